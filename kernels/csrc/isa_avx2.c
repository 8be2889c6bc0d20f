/* AVX2 has no dot product that adds to 32 bits. vpmaddubsw multiplies 32 pairs of an unsigned by a
 * signed byte and adds neighbours to 16 bits, saturated.
 *
 * With codes of at most 2, two products are within 512, and 63 such sums fit 16 bits: they are
 * added there, exactly, and widened only then. With any bytes, two products must fit on their own:
 * 128 * 127 * 2 does, once the sign of x has moved to w. */

#include "avx2.h"

enum {
    TILE_ROWS = 4,
    PREFETCH_BYTES = 8192,
    MAX_STEPS = 63,                           /* of up to 2 * 128 * 2 */
    MAX_BLOCKS = MAX_STEPS / QUADS_PER_BLOCK, /* each of four steps */
};

/* Adds neighbouring 16-bit sums, and the result to 32-bit ones. */
INLINE void widen_to(int32_t *sum, __m256i sums16)
{
    /* GCC would otherwise keep copies for this, and make them inside the loop before. */
    sums16 = in_register(sums16);
    __m256i sums32 = _mm256_madd_epi16(sums16, _mm256_set1_epi16(1));
    _mm256_storeu_si256((__m256i *)sum, _mm256_add_epi32(load(sum), sums32));
}

static void ternary_row(const uint8_t *panel, const int8_t *x, int64_t quads, int32_t *sum)
{
    for (int64_t blocks = quads / QUADS_PER_BLOCK; blocks > 0; blocks -= MAX_BLOCKS) {
        __m256i acc[VECTORS];
        UNROLLED(v, VECTORS)
            acc[v] = _mm256_setzero_si256();
        int64_t steps = blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS;
        for (int64_t step = 0; step < steps; step++, panel += BLOCK_BYTES, x += BLOCK_K) {
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

/* Up to MAX_STEPS quads of two vectors of the panel; `codes` and `sum` begin there. */
INLINE void ternary_tile_of(int rows, const uint8_t *codes, const int8_t *x, int64_t quads,
                            int32_t *sum)
{
    __m256i low[TILE_ROWS], high[TILE_ROWS];
    UNROLLED(r, rows)
        low[r] = high[r] = _mm256_setzero_si256();
    for (int64_t quad = 0; quad < quads; quad++, codes += QUAD_BYTES, x += QUAD * rows) {
        __m256i w_low = load(codes), w_high = load(codes + VECTOR_BYTES);
        UNROLLED(r, rows) {
            __m256i x_quad = broadcast(x + QUAD * r);
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(w_low, x_quad));
            high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(w_high, x_quad));
        }
    }
    UNROLLED(r, rows) {
        widen_to(sum + PANEL_ROWS * r, low[r]);
        widen_to(sum + PANEL_ROWS * r + VECTOR_LANES, high[r]);
    }
}

/* The number of rows must be a constant for the sums to live in registers. */
static void ternary_tile(const uint8_t *codes, const int8_t *x, int64_t quads, int rows,
                         int32_t *sum)
{
    for (int64_t left = quads; left > 0; left -= MAX_STEPS) {
        int64_t steps = left < MAX_STEPS ? left : MAX_STEPS;
        for (int v = 0; v < VECTORS; v += 2) {
            const uint8_t *w = codes + VECTOR_BYTES * v;
            int32_t *to = sum + VECTOR_LANES * v;
            switch (rows) {
            case 1: ternary_tile_of(1, w, x, steps, to); break;
            case 2: ternary_tile_of(2, w, x, steps, to); break;
            case 3: ternary_tile_of(3, w, x, steps, to); break;
            default: ternary_tile_of(4, w, x, steps, to); break;
            }
        }
        codes += QUAD_BYTES * steps;
        x += QUAD * rows * steps;
    }
}

/* Two vectors of the panel; `bytes` and `sum` begin there. */
INLINE void byte_tile_of(int rows, const uint8_t *bytes, const int8_t *x, int64_t quads,
                         int32_t *sum)
{
    const __m256i sign = _mm256_set1_epi8((char)0x80), ones = _mm256_set1_epi16(1);
    __m256i low[TILE_ROWS], high[TILE_ROWS];
    UNROLLED(r, rows) {
        low[r] = load(sum + PANEL_ROWS * r);
        high[r] = load(sum + PANEL_ROWS * r + VECTOR_LANES);
    }
    for (int64_t quad = 0; quad < quads; quad++, bytes += QUAD_BYTES, x += QUAD * rows) {
        __m256i w_low = _mm256_xor_si256(load(bytes), sign); /* w + 128 to w */
        __m256i w_high = _mm256_xor_si256(load(bytes + VECTOR_BYTES), sign);
        UNROLLED(r, rows) {
            __m256i x_quad = broadcast(x + QUAD * r), magnitude = _mm256_abs_epi8(x_quad);
            __m256i pairs_low = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(w_low, x_quad));
            __m256i pairs_high = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(w_high, x_quad));
            low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(pairs_low, ones));
            high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(pairs_high, ones));
        }
    }
    UNROLLED(r, rows) {
        _mm256_storeu_si256((__m256i *)(sum + PANEL_ROWS * r), low[r]);
        _mm256_storeu_si256((__m256i *)(sum + PANEL_ROWS * r + VECTOR_LANES), high[r]);
    }
}

static void byte_tile(const uint8_t *bytes, const int8_t *x, int64_t quads, int rows, int32_t *sum)
{
    for (int v = 0; v < VECTORS; v += 2, bytes += 2 * VECTOR_BYTES, sum += 2 * VECTOR_LANES)
        switch (rows) {
        case 1: byte_tile_of(1, bytes, x, quads, sum); break;
        case 2: byte_tile_of(2, bytes, x, quads, sum); break;
        case 3: byte_tile_of(3, bytes, x, quads, sum); break;
        default: byte_tile_of(4, bytes, x, quads, sum); break;
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
};
