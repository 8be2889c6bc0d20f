/* Any processor, in vectors that GCC and Clang translate for what it has. */

#include "elementwise.h"
#include "isa.h"

enum {
    TILE_ROWS = 4,
    UNPACK_QUADS = 32, /* at a time, for one row */
    MAX_STEPS = 127,   /* so many products of 2 * 128 fit a 16-bit sum */
    LANES = 8,
    VECTORS = PANEL_ROWS / LANES,
};

typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int16_t lanes __attribute__((vector_size(2 * LANES)));

/* To [k][64], in place of [quad][64][4]: then sums of 16 bits are side by side, which even old
 * vector units multiply and add. */
static void unpack(const uint8_t *panel, int64_t quads, uint8_t *codes)
{
    for (int64_t block = 0; block < quads / QUADS_PER_BLOCK; block++, panel += BLOCK_BYTES)
        for (int plane = 0; plane < QUADS_PER_BLOCK; plane++)
            for (int i = 0; i < QUAD; i++, codes += PANEL_ROWS)
                for (int n = 0; n < PANEL_ROWS; n++)
                    codes[n] = panel[QUAD * n + i] >> 2 * plane & 3;
}

/* One row of x, whose quads are `stride` bytes apart, from first_k on, with up to MAX_STEPS of K.
 */
static void multiply_codes(const uint8_t *codes, const int8_t *x, int64_t stride, int64_t first_k,
                           int64_t steps, int32_t *sum)
{
    lanes acc[VECTORS];
    UNROLLED(v, VECTORS)
        acc[v] = (lanes){0};
    for (uint64_t k = (uint64_t)first_k; k < (uint64_t)(first_k + steps); k++) {
        int16_t value = x[(int64_t)(k / QUAD) * stride + (int64_t)(k % QUAD)];
        UNROLLED(v, VECTORS) {
            bytes w;
            memcpy(&w, codes + k * PANEL_ROWS + LANES * v, sizeof w);
            acc[v] += __builtin_convertvector(w, lanes) * value;
        }
    }
    for (int n = 0; n < PANEL_ROWS; n++)
        sum[n] += acc[n / LANES][n % LANES];
}

static void ternary_tile(const uint8_t *codes, const int8_t *x, int64_t quads, int rows,
                         int32_t *sum)
{
    for (int64_t k = 0; k < quads * QUAD; k += MAX_STEPS) {
        int64_t left = quads * QUAD - k;
        for (int r = 0; r < rows; r++)
            multiply_codes(codes, x + QUAD * r, QUAD * rows, k, left < MAX_STEPS ? left : MAX_STEPS,
                           sum + PANEL_ROWS * r);
    }
}

static void ternary_row(const uint8_t *panel, const int8_t *x, int64_t quads, int32_t *sum)
{
    uint8_t codes[UNPACK_QUADS * QUAD_BYTES];
    for (int64_t quad = 0; quad < quads; quad += UNPACK_QUADS) {
        int64_t count = quads - quad < UNPACK_QUADS ? quads - quad : UNPACK_QUADS;
        unpack(panel + quad / QUADS_PER_BLOCK * BLOCK_BYTES, count, codes);
        ternary_tile(codes, x + quad * QUAD, count, 1, sum);
    }
}

static void byte_tile(const uint8_t *bytes, const int8_t *x, int64_t quads, int rows, int32_t *sum)
{
    for (int64_t quad = 0; quad < quads; quad++, bytes += QUAD_BYTES)
        for (int r = 0; r < rows; r++, x += QUAD)
            for (int n = 0; n < PANEL_ROWS; n++)
                for (int i = 0; i < QUAD; i++)
                    sum[PANEL_ROWS * r + n] += (bytes[QUAD * n + i] - 128) * x[i];
}

static int64_t dot_loop(int64_t count)
{
    static const uint8_t codes[QUAD_BYTES];
    int32_t sum[PANEL_ROWS] = {0};
    int8_t x[QUAD] = {0};
    for (int64_t done = 0; done < count; done++) {
        __asm__ volatile("" : : "r"(x), "r"(sum) : "memory"); /* each turn counts */
        ternary_tile(codes, x, 1, 1, sum);
    }
    return count * QUAD_BYTES * 2;
}

const struct isa isa_portable = {
    .name = "portable",
    .micro = {.single_rows = 1,
              .tile_rows = TILE_ROWS,
              .byte_offset = 0,
              .ternary_row = ternary_row,
              .unpack = unpack,
              .ternary_tile = ternary_tile,
              .byte_tile = byte_tile,
              .dot_loop = dot_loop},
    .elementwise = ELEMENTWISE,
};
