/* Any processor, in vectors that GCC and Clang translate for what it has. */

#include "elementwise.h"
#include "float_tiles.h"
#include "isa.h"

enum {
    TILE_ROWS = 4,
    UNPACK_BLOCKS = 8, /* at a time, for one row */
    MAX_BLOCKS = 7,    /* of 16 products of up to 2 * 128: so many fit a 16-bit sum */
    LANES = 8,
    VECTORS = PANEL_ROWS / LANES,
};

typedef uint8_t byte_lanes __attribute__((vector_size(LANES)));
typedef int16_t lanes __attribute__((vector_size(2 * LANES)));

/* To [k][64], in place of [quad][64][4]: then sums of 16 bits are side by side, which even old
 * vector units multiply and add. */
static void unpack(const uint8_t *panel, int64_t blocks, uint8_t *codes)
{
    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK)
        for (int plane = 0; plane < QUADS_PER_BLOCK; plane++)
            for (int i = 0; i < QUAD; i++, codes += PANEL_ROWS)
                for (int n = 0; n < PANEL_ROWS; n++)
                    codes[n] = panel[QUAD * n + i] >> 2 * plane & 3;
}

/* One row of x, whose blocks are `stride` bytes apart, with up to MAX_BLOCKS. */
static void multiply_codes(const uint8_t *codes, const int8_t *x, int64_t stride, int64_t blocks,
                           int32_t *sum)
{
    lanes acc[VECTORS];
    UNROLLED(v, VECTORS)
        acc[v] = (lanes){0};
    for (int64_t block = 0; block < blocks; block++, x += stride)
        for (int i = 0; i < BLOCK_K; i++, codes += PANEL_ROWS) {
            int16_t value = x[i];
            UNROLLED(v, VECTORS) {
                byte_lanes w;
                memcpy(&w, codes + LANES * v, sizeof w);
                acc[v] += __builtin_convertvector(w, lanes) * value;
            }
        }
    for (int n = 0; n < PANEL_ROWS; n++)
        sum[n] += acc[n / LANES][n % LANES];
}

static void ternary_tile(const uint8_t *codes, const int8_t *x, int64_t blocks, int rows,
                         int32_t *sum)
{
    for (int64_t left = blocks; left > 0; left -= MAX_BLOCKS) {
        int64_t steps = left < MAX_BLOCKS ? left : MAX_BLOCKS;
        for (int r = 0; r < rows; r++)
            multiply_codes(codes, x + BLOCK_K * r, BLOCK_K * rows, steps, sum + PANEL_ROWS * r);
        codes += BYTE_BLOCK * steps;
        x += BLOCK_K * rows * steps;
    }
}

static void ternary_row(const uint8_t *panel, const int8_t *x, int64_t blocks, int32_t *sum)
{
    uint8_t codes[UNPACK_BLOCKS * BYTE_BLOCK];
    for (int64_t left = blocks; left > 0; left -= UNPACK_BLOCKS) {
        int64_t count = left < UNPACK_BLOCKS ? left : UNPACK_BLOCKS;
        unpack(panel, count, codes);
        ternary_tile(codes, x, count, 1, sum);
        panel += PACKED_BLOCK * count;
        x += BLOCK_K * count;
    }
}

static void byte_tile(const uint8_t *bytes, const int8_t *x, int64_t blocks, int rows, int32_t *sum)
{
    for (int64_t block = 0; block < blocks; block++, x += BLOCK_K * rows)
        for (int quad = 0; quad < QUADS_PER_BLOCK; quad++, bytes += QUAD_BYTES)
            for (int r = 0; r < rows; r++)
                for (int n = 0; n < PANEL_ROWS; n++)
                    for (int i = 0; i < QUAD; i++)
                        sum[PANEL_ROWS * r + n] +=
                            (bytes[QUAD * n + i] - 128) * x[BLOCK_K * r + QUAD * quad + i];
}

static int64_t dot_loop(int64_t count)
{
    static const uint8_t codes[BYTE_BLOCK];
    int32_t sum[PANEL_ROWS] = {0};
    int8_t x[BLOCK_K] = {0};
    const int64_t turns = (count + 63) / 64; /* each in place of 64 vectors of 16 bytes */
    for (int64_t turn = 0; turn < turns; turn++) {
        __asm__ volatile("" : : "r"(x), "r"(sum) : "memory"); /* as if they changed and were used */
        ternary_tile(codes, x, 1, 1, sum);
    }
    return turns * BYTE_BLOCK * 2;
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
    .floats = FLOAT_KERNELS,
};
