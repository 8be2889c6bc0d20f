/* ARM with dot products (from ARMv8.2 on): sdot multiplies 16 pairs of signed bytes and adds them
 * to four sums. Codes 0..2 are signed bytes as they are; bytes w + 128 become w by a flipped bit.
 */

#include <arm_neon.h>

#include "elementwise.h"
#include "float_tiles.h"
#include "isa.h"

/* A panel of 64 rows is sixteen vectors wide. Six rows of x and four vectors make 24 sums, which
 * with the weights and one x take 29 of 32 registers. */
enum { VECTORS = 16, TILE_ROWS = 6, VECTOR_BYTES = 16, VECTOR_LANES = 4 };

INLINE int8x16_t load(const uint8_t *from)
{
    return vreinterpretq_s8_u8(vld1q_u8(from));
}

/* The quad at x in each lane. */
INLINE int8x16_t broadcast(const int8_t *x)
{
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}

INLINE int8x16_t masked(uint8x16_t packed)
{
    return vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(3)));
}

static void ternary_row(const uint8_t *panel, const int8_t *x, int64_t blocks, int32_t *sum)
{
    int32x4_t acc[VECTORS];
    UNROLLED(v, VECTORS)
        acc[v] = vld1q_s32(sum + VECTOR_LANES * v);
    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK) {
        int8x16_t x_block = vld1q_s8(x + BLOCK_K * block);
        UNROLLED(v, VECTORS) {
            uint8x16_t packed = vld1q_u8(panel + VECTOR_BYTES * v);
            acc[v] = vdotq_laneq_s32(acc[v], masked(packed), x_block, 0);
            acc[v] = vdotq_laneq_s32(acc[v], masked(vshrq_n_u8(packed, 2)), x_block, 1);
            acc[v] = vdotq_laneq_s32(acc[v], masked(vshrq_n_u8(packed, 4)), x_block, 2);
            int8x16_t last = vreinterpretq_s8_u8(vshrq_n_u8(packed, 6));
            acc[v] = vdotq_laneq_s32(acc[v], last, x_block, 3);
        }
    }
    UNROLLED(v, VECTORS)
        vst1q_s32(sum + VECTOR_LANES * v, acc[v]);
}

static void unpack(const uint8_t *panel, int64_t blocks, uint8_t *codes)
{
    const uint8x16_t mask = vdupq_n_u8(3);
    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK) {
        for (int v = 0; v < VECTORS; v++, codes += VECTOR_BYTES) {
            uint8x16_t packed = vld1q_u8(panel + VECTOR_BYTES * v);
            vst1q_u8(codes, vandq_u8(packed, mask));
            vst1q_u8(codes + QUAD_BYTES, vandq_u8(vshrq_n_u8(packed, 2), mask));
            vst1q_u8(codes + 2 * QUAD_BYTES, vandq_u8(vshrq_n_u8(packed, 4), mask));
            vst1q_u8(codes + 3 * QUAD_BYTES, vshrq_n_u8(packed, 6));
        }
        codes += BYTE_BLOCK - QUAD_BYTES;
    }
}

/* All rows with so many vectors of the panel; `bytes` and `sum` begin there. `flip` is 0x80 for
 * bytes w + 128, else 0. */
INLINE void strip(int rows, int vectors, uint8_t flip, const uint8_t *bytes, const int8_t *x,
                  int64_t blocks, int32_t *sum)
{
    const int8x16_t flipped = vreinterpretq_s8_u8(vdupq_n_u8(flip));
    int32x4_t acc[TILE_ROWS][VECTORS];
    UNROLLED(r, rows)
        UNROLLED(v, vectors)
            acc[r][v] = vld1q_s32(sum + PANEL_ROWS * r + VECTOR_LANES * v);
    for (int64_t block = 0; block < blocks; block++, x += BLOCK_K * rows)
        UNROLLED(quad, QUADS_PER_BLOCK) {
            int8x16_t w[VECTORS];
            UNROLLED(v, vectors)
                w[v] = veorq_s8(load(bytes + VECTOR_BYTES * v), flipped);
            UNROLLED(r, rows) {
                int8x16_t x_quad = broadcast(x + BLOCK_K * r + QUAD * quad);
                UNROLLED(v, vectors)
                    acc[r][v] = vdotq_s32(acc[r][v], w[v], x_quad);
            }
            bytes += QUAD_BYTES;
        }
    UNROLLED(r, rows)
        UNROLLED(v, vectors)
            vst1q_s32(sum + PANEL_ROWS * r + VECTOR_LANES * v, acc[r][v]);
}

/* In strips as wide as registers allow; a single row reads the panel in one stream. */
INLINE void strips(int rows, int vectors, uint8_t flip, const uint8_t *bytes, const int8_t *x,
                   int64_t blocks, int32_t *sum)
{
    for (int v = 0; v < VECTORS; v += vectors)
        strip(rows, vectors, flip, bytes + VECTOR_BYTES * v, x, blocks, sum + VECTOR_LANES * v);
}

/* The number of rows must be a constant for the sums to live in registers. */
INLINE void tile(uint8_t flip, const uint8_t *bytes, const int8_t *x, int64_t blocks, int rows,
                 int32_t *sum)
{
    switch (rows) {
    case 1: strips(1, 16, flip, bytes, x, blocks, sum); break;
    case 2: strips(2, 8, flip, bytes, x, blocks, sum); break;
    case 3: strips(3, 4, flip, bytes, x, blocks, sum); break;
    case 4: strips(4, 4, flip, bytes, x, blocks, sum); break;
    case 5: strips(5, 4, flip, bytes, x, blocks, sum); break;
    default: strips(6, 4, flip, bytes, x, blocks, sum); break;
    }
}

static void ternary_tile(const uint8_t *codes, const int8_t *x, int64_t blocks, int rows,
                         int32_t *sum)
{
    tile(0, codes, x, blocks, rows, sum);
}

static void byte_tile(const uint8_t *bytes, const int8_t *x, int64_t blocks, int rows, int32_t *sum)
{
    tile(0x80, bytes, x, blocks, rows, sum);
}

/* Keeps the compiler from leaving out what computes a vector. */
INLINE void used(int32x4_t vector)
{
    __asm__ volatile("" : : "w"(vector));
}

static int64_t dot_loop(int64_t count)
{
    enum { CHAINS = 16 }; /* more than the latency times the instructions per cycle */
    int32x4_t acc[CHAINS];
    int8x16_t w = vdupq_n_s8(1), x = vdupq_n_s8(2);
    UNROLLED(i, CHAINS)
        acc[i] = vdupq_n_s32(i);
    for (int64_t done = 0; done < count; done += CHAINS)
        UNROLLED(i, CHAINS) {
            acc[i] = vdotq_s32(acc[i], w, x);
            __asm__("" : "+w"(acc[i]));
        }
    UNROLLED(i, CHAINS)
        used(acc[i]);
    return (count + CHAINS - 1) / CHAINS * CHAINS * VECTOR_BYTES * 2;
}

const struct isa isa_neondot = {
    .name = "neondot",
    .micro = {.single_rows = 4,
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
