/* VNNI in 256-bit vectors, without AVX-512: vpdpbusd multiplies 32 pairs of an unsigned by a signed
 * byte and adds them to eight sums. */

#include "avx2.h"
#include "float_tiles.h"

/* Six rows of x and two vectors make 12 sums, with two weights and one x 15 of 16 registers. */
enum { TILE_ROWS = 6, PREFETCH_BYTES = 8192 };

static void ternary_row(const uint8_t *panel, const int8_t *x, int64_t blocks, int32_t *sum)
{
    __m256i acc[VECTORS];
    UNROLLED(v, VECTORS)
        acc[v] = load(sum + VECTOR_LANES * v);
    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK, x += BLOCK_K) {
        __m256i quad[QUADS_PER_BLOCK];
        UNROLLED(plane, QUADS_PER_BLOCK)
            quad[plane] = broadcast(x + QUAD * plane);
        UNROLLED(v, VECTORS) {
            if (v % 2 == 0)
                _mm_prefetch((const char *)panel + VECTOR_BYTES * v + PREFETCH_BYTES, _MM_HINT_T0);
            __m256i packed = in_register(load(panel + VECTOR_BYTES * v));
            UNROLLED(plane, QUADS_PER_BLOCK)
                acc[v] = _mm256_dpbusd_avx_epi32(acc[v], codes_of(packed, plane), quad[plane]);
        }
    }
    UNROLLED(v, VECTORS)
        store(sum + VECTOR_LANES * v, acc[v]);
}

/* All rows with so many vectors of the panel; `bytes` and `sum` begin there. */
INLINE void byte_strip(int rows, int vectors, const uint8_t *bytes, const int8_t *x, int64_t blocks,
                       int32_t *sum)
{
    __m256i acc[TILE_ROWS][VECTORS];
    UNROLLED(r, rows)
        UNROLLED(v, vectors)
            acc[r][v] = load(sum + PANEL_ROWS * r + VECTOR_LANES * v);
    for (int64_t block = 0; block < blocks; block++, x += BLOCK_K * rows)
        UNROLLED(quad, QUADS_PER_BLOCK) {
            __m256i w[VECTORS];
            UNROLLED(v, vectors)
                w[v] = load(bytes + VECTOR_BYTES * v);
            UNROLLED(r, rows) {
                __m256i x_quad = broadcast(x + BLOCK_K * r + QUAD * quad);
                UNROLLED(v, vectors)
                    acc[r][v] = _mm256_dpbusd_avx_epi32(acc[r][v], w[v], x_quad);
            }
            bytes += QUAD_BYTES;
        }
    UNROLLED(r, rows)
        UNROLLED(v, vectors)
            store(sum + PANEL_ROWS * r + VECTOR_LANES * v, acc[r][v]);
}

/* In strips as wide as registers allow; a single row reads the panel in one stream. */
INLINE void byte_strips(int rows, int vectors, const uint8_t *bytes, const int8_t *x,
                        int64_t blocks, int32_t *sum)
{
    for (int v = 0; v < VECTORS; v += vectors)
        byte_strip(rows, vectors, bytes + VECTOR_BYTES * v, x, blocks, sum + VECTOR_LANES * v);
}

/* The number of rows must be a constant for the sums to live in registers. */
static void byte_tile(const uint8_t *bytes, const int8_t *x, int64_t blocks, int rows, int32_t *sum)
{
    switch (rows) {
    case 1: byte_strips(1, 8, bytes, x, blocks, sum); break;
    case 2: byte_strips(2, 4, bytes, x, blocks, sum); break;
    case 3: byte_strips(3, 4, bytes, x, blocks, sum); break;
    case 4: byte_strips(4, 2, bytes, x, blocks, sum); break;
    case 5: byte_strips(5, 2, bytes, x, blocks, sum); break;
    default: byte_strips(6, 2, bytes, x, blocks, sum); break;
    }
}

static int64_t dot_loop(int64_t count)
{
    enum { CHAINS = 12 }; /* more than the latency times the instructions per cycle */
    __m256i acc[CHAINS], w = _mm256_set1_epi8(1), x = _mm256_set1_epi8(2);
    UNROLLED(i, CHAINS)
        acc[i] = _mm256_set1_epi32(i);
    for (int64_t done = 0; done < count; done += CHAINS)
        UNROLLED(i, CHAINS)
            acc[i] = in_register(_mm256_dpbusd_avx_epi32(acc[i], w, x));
    UNROLLED(i, CHAINS)
        used(acc[i]);
    return (count + CHAINS - 1) / CHAINS * CHAINS * VECTOR_BYTES * 2;
}

const struct isa isa_avxvnni = {
    .name = "avxvnni",
    .micro = {.single_rows = 4,
              .tile_rows = TILE_ROWS,
              .byte_offset = 128,
              .ternary_row = ternary_row,
              .unpack = unpack,
              .ternary_tile = byte_tile,
              .byte_tile = byte_tile,
              .dot_loop = dot_loop},
    .elementwise = ELEMENTWISE,
    .floats = FLOAT_KERNELS,
};
