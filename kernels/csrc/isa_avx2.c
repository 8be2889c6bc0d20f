/* AVX2 has no dot product that adds to 32 bits. vpmaddubsw multiplies 32 pairs of an unsigned by a
 * signed byte and adds neighbours to 16 bits, saturated.
 *
 * With codes of at most 2, two products are within 512, and 63 such sums fit 16 bits: they are
 * added there, exactly, and widened only then. With any bytes, two products must fit on their own:
 * 128 * 127 * 2 does, once the sign of x has moved to w. */

#include "avx2.h"
#include "float_tiles.h"

enum {
    TILE_ROWS = 4,
    PREFETCH_BYTES = 8192,
    MAX_BLOCKS = 15, /* of four sums of up to 2 * 128 * 2 */
};

/* Adds neighbouring 16-bit sums, and the result to 32-bit ones. */
INLINE void widen_to(int32_t *sum, __m256i sums16)
{
    /* GCC would otherwise keep copies for this, and make them inside the loop before. */
    sums16 = in_register(sums16);
    __m256i sums32 = _mm256_madd_epi16(sums16, _mm256_set1_epi16(1));
    store(sum, _mm256_add_epi32(load(sum), sums32));
}

static void ternary_row(const uint8_t *panel, const int8_t *x, int64_t blocks, int32_t *sum)
{
    for (int64_t left = blocks; left > 0; left -= MAX_BLOCKS) {
        __m256i acc[VECTORS];
        UNROLLED(v, VECTORS)
            acc[v] = _mm256_setzero_si256();
        int64_t steps = left < MAX_BLOCKS ? left : MAX_BLOCKS;
        for (int64_t step = 0; step < steps; step++, panel += PACKED_BLOCK, x += BLOCK_K) {
            __m256i quad[QUADS_PER_BLOCK];
            UNROLLED(plane, QUADS_PER_BLOCK)
                quad[plane] = broadcast(x + QUAD * plane);
            UNROLLED(v, VECTORS) {
                if (v % 2 == 0)
                    _mm_prefetch((const char *)panel + VECTOR_BYTES * v + PREFETCH_BYTES,
                                 _MM_HINT_T0);
                __m256i packed = in_register(load(panel + VECTOR_BYTES * v));
                UNROLLED(plane, QUADS_PER_BLOCK)
                    acc[v] = _mm256_add_epi16(
                        acc[v], _mm256_maddubs_epi16(codes_of(packed, plane), quad[plane]));
            }
        }
        UNROLLED(v, VECTORS)
            widen_to(sum + VECTOR_LANES * v, acc[v]);
    }
}

/* Up to MAX_BLOCKS of two vectors of the panel; `codes` and `sum` begin there. */
INLINE void ternary_strip(int rows, const uint8_t *codes, const int8_t *x, int64_t blocks,
                          int32_t *sum)
{
    __m256i acc[TILE_ROWS][2];
    UNROLLED(r, rows)
        UNROLLED(v, 2)
            acc[r][v] = _mm256_setzero_si256();
    for (int64_t block = 0; block < blocks; block++, x += BLOCK_K * rows)
        ROLLED(quad, QUADS_PER_BLOCK) {
            __m256i w[2] = {load(codes), load(codes + VECTOR_BYTES)};
            UNROLLED(r, rows) {
                __m256i x_quad = broadcast(x + BLOCK_K * r + QUAD * quad);
                UNROLLED(v, 2)
                    acc[r][v] = _mm256_add_epi16(acc[r][v], _mm256_maddubs_epi16(w[v], x_quad));
            }
            codes += QUAD_BYTES;
        }
    UNROLLED(r, rows)
        UNROLLED(v, 2)
            widen_to(sum + PANEL_ROWS * r + VECTOR_LANES * v, acc[r][v]);
}

/* The number of rows must be a constant for the sums to live in registers. */
static void ternary_tile(const uint8_t *codes, const int8_t *x, int64_t blocks, int rows,
                         int32_t *sum)
{
    for (int64_t left = blocks; left > 0; left -= MAX_BLOCKS) {
        int64_t steps = left < MAX_BLOCKS ? left : MAX_BLOCKS;
        for (int v = 0; v < VECTORS; v += 2) {
            const uint8_t *w = codes + VECTOR_BYTES * v;
            int32_t *to = sum + VECTOR_LANES * v;
            switch (rows) {
            case 1: ternary_strip(1, w, x, steps, to); break;
            case 2: ternary_strip(2, w, x, steps, to); break;
            case 3: ternary_strip(3, w, x, steps, to); break;
            default: ternary_strip(4, w, x, steps, to); break;
            }
        }
        codes += BYTE_BLOCK * steps;
        x += BLOCK_K * rows * steps;
    }
}

/* All rows with so many vectors of the panel; `bytes` and `sum` begin there. */
INLINE void byte_strip(int rows, int vectors, const uint8_t *bytes, const int8_t *x, int64_t blocks,
                       int32_t *sum)
{
    const __m256i sign = _mm256_set1_epi8((char)0x80), ones = _mm256_set1_epi16(1);
    __m256i acc[TILE_ROWS][VECTORS];
    UNROLLED(r, rows)
        UNROLLED(v, vectors)
            acc[r][v] = load(sum + PANEL_ROWS * r + VECTOR_LANES * v);
    for (int64_t block = 0; block < blocks; block++, x += BLOCK_K * rows)
        ROLLED(quad, QUADS_PER_BLOCK) {
            __m256i w[VECTORS];
            UNROLLED(v, vectors)
                w[v] = _mm256_xor_si256(load(bytes + VECTOR_BYTES * v), sign); /* w + 128 to w */
            UNROLLED(r, rows) {
                __m256i x_quad = broadcast(x + BLOCK_K * r + QUAD * quad);
                __m256i magnitude = _mm256_abs_epi8(x_quad);
                UNROLLED(v, vectors) {
                    __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(w[v], x_quad));
                    acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs, ones));
                }
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

static void byte_tile(const uint8_t *bytes, const int8_t *x, int64_t blocks, int rows, int32_t *sum)
{
    switch (rows) {
    case 1: byte_strips(1, 8, bytes, x, blocks, sum); break;
    case 2: byte_strips(2, 4, bytes, x, blocks, sum); break;
    case 3: byte_strips(3, 2, bytes, x, blocks, sum); break;
    default: byte_strips(4, 2, bytes, x, blocks, sum); break;
    }
}

static int64_t dot_loop(int64_t count)
{
    enum { CHAINS = 8 };
    __m256i acc[CHAINS], w = _mm256_set1_epi8(1), x = _mm256_set1_epi8(2);
    UNROLLED(i, CHAINS)
        acc[i] = _mm256_set1_epi16((short)i);
    for (int64_t done = 0; done < count; done += CHAINS)
        UNROLLED(i, CHAINS) {
            x = in_register(x); /* as if it were another one, so that each product is computed */
            acc[i] = _mm256_add_epi16(acc[i], _mm256_maddubs_epi16(w, x));
        }
    UNROLLED(i, CHAINS)
        used(acc[i]);
    return (count + CHAINS - 1) / CHAINS * CHAINS * VECTOR_BYTES * 2;
}

const struct isa isa_avx2 = {
    .name = "avx2",
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
