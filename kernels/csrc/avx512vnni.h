/* AVX-512 with VNNI: vpdpbusd multiplies 64 pairs of an unsigned by a signed byte and adds them to
 * 16 sums. Codes and bytes are the unsigned side, activations the signed one. */

#ifndef MEGABIT_AVX512VNNI_H
#define MEGABIT_AVX512VNNI_H

#include <immintrin.h>
#include <string.h>

#include "isa.h"

/* A panel of 64 rows is four vectors wide. Six rows of x make 24 sums, which with the four weights,
 * a mask and one x leave two of the 32 registers. The distance of prefetches is measured: weights
 * of a single row then come at the speed of DRAM. */
enum { VECTORS = 4, TILE_ROWS = 6, PREFETCH_BYTES = 8192 };

INLINE __m512i load(const void *from)
{
    return _mm512_loadu_si512(from);
}

/* The quad at x in each lane. */
INLINE __m512i broadcast(const int8_t *x)
{
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return _mm512_set1_epi32(quad);
}

/* Keeps the compiler from reading a vector again for each of its uses. */
INLINE __m512i in_register(__m512i vector)
{
    __asm__("" : "+v"(vector));
    return vector;
}

/* One token reads every weight once, so nothing but the weights counts: no shifts. Each plane is
 * masked where it stands, as code << 2p, and has its own sums, which end up 4^p times too large;
 * the largest, 128 * 128 * K/4, fits int32 for K up to 131072. */
static void ternary_row(const uint8_t *panel, const int8_t *x, int64_t blocks, int32_t *sum)
{
    const __m512i mask[QUADS_PER_BLOCK] = {_mm512_set1_epi8(0x03), _mm512_set1_epi8(0x0c),
                                           _mm512_set1_epi8(0x30), _mm512_set1_epi8((char)0xc0)};
    __m512i acc[VECTORS][QUADS_PER_BLOCK];
    UNROLLED(v, VECTORS)
        UNROLLED(plane, QUADS_PER_BLOCK)
            acc[v][plane] = _mm512_setzero_si512();

    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK, x += BLOCK_K) {
        __m512i quad[QUADS_PER_BLOCK];
        UNROLLED(plane, QUADS_PER_BLOCK)
            quad[plane] = broadcast(x + QUAD * plane);
        UNROLLED(v, VECTORS) {
            _mm_prefetch((const char *)panel + 64 * v + PREFETCH_BYTES, _MM_HINT_T0);
            __m512i codes = in_register(load(panel + 64 * v));
            UNROLLED(plane, QUADS_PER_BLOCK)
                acc[v][plane] = _mm512_dpbusd_epi32(
                    acc[v][plane], _mm512_and_si512(codes, mask[plane]), quad[plane]);
        }
    }

    UNROLLED(v, VECTORS) {
        /* GCC would otherwise keep copies for what follows, and make them inside the loop. */
        UNROLLED(plane, QUADS_PER_BLOCK)
            acc[v][plane] = in_register(acc[v][plane]);
        __m512i low = _mm512_add_epi32(acc[v][0], _mm512_srai_epi32(acc[v][1], 2));
        __m512i high =
            _mm512_add_epi32(_mm512_srai_epi32(acc[v][2], 4), _mm512_srai_epi32(acc[v][3], 6));
        __m512i total = _mm512_add_epi32(low, high);
        _mm512_storeu_si512(sum + 16 * v, _mm512_add_epi32(load(sum + 16 * v), total));
    }
}

INLINE void load_sums(__m512i acc[][VECTORS], const int32_t *sum, int rows)
{
    UNROLLED(r, rows)
        UNROLLED(v, VECTORS)
            acc[r][v] = load(sum + PANEL_ROWS * r + 16 * v);
}

INLINE void store_sums(int32_t *sum, __m512i acc[][VECTORS], int rows)
{
    UNROLLED(r, rows)
        UNROLLED(v, VECTORS)
            _mm512_storeu_si512(sum + PANEL_ROWS * r + 16 * v, acc[r][v]);
}

/* One quad of `rows` rows of x with the same quad of 64 rows of W. */
INLINE void multiply(__m512i acc[][VECTORS], const __m512i w[VECTORS], const int8_t *x, int rows)
{
    UNROLLED(r, rows) {
        __m512i quad = broadcast(x + BLOCK_K * r);
        UNROLLED(v, VECTORS)
            acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], w[v], quad);
    }
}

INLINE void ternary_tile_of(int rows, const uint8_t *panel, const int8_t *x, int64_t blocks,
                            int32_t *sum)
{
    const __m512i mask = _mm512_set1_epi8(0x03);
    __m512i acc[TILE_ROWS][VECTORS];
    load_sums(acc, sum, rows);
    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK) {
        UNROLLED(v, VECTORS)
            _mm_prefetch((const char *)panel + 64 * v + PREFETCH_BYTES, _MM_HINT_T0);
        UNROLLED(plane, QUADS_PER_BLOCK) {
            /* Each plane reads the panel again, from L1: four registers for it are not left. */
            __asm__("" : "+r"(panel));
            __m512i codes[VECTORS];
            UNROLLED(v, VECTORS)
                codes[v] =
                    _mm512_and_si512(_mm512_srli_epi16(load(panel + 64 * v), 2 * plane), mask);
            multiply(acc, codes, x + QUAD * plane, rows);
        }
        x += BLOCK_K * rows;
    }
    store_sums(sum, acc, rows);
}

INLINE void byte_tile_of(int rows, const uint8_t *bytes, const int8_t *x, int64_t blocks,
                         int32_t *sum)
{
    __m512i acc[TILE_ROWS][VECTORS];
    load_sums(acc, sum, rows);
    for (int64_t block = 0; block < blocks; block++, x += BLOCK_K * rows)
        UNROLLED(quad, QUADS_PER_BLOCK) {
            __m512i w[VECTORS];
            UNROLLED(v, VECTORS) {
                w[v] = load(bytes + 64 * v);
                /* While several tiles read this chunk, the next one is on its way to L2. */
                _mm_prefetch((const char *)bytes + 64 * v + CHUNK_BLOCKS * BYTE_BLOCK, _MM_HINT_T1);
            }
            multiply(acc, w, x + QUAD * quad, rows);
            bytes += QUAD_BYTES;
        }
    store_sums(sum, acc, rows);
}

/* The number of rows must be a constant for the sums to live in registers. */
static void ternary_tile(const uint8_t *panel, const int8_t *x, int64_t blocks, int rows,
                         int32_t *sum)
{
    switch (rows) {
    case 1: ternary_tile_of(1, panel, x, blocks, sum); break;
    case 2: ternary_tile_of(2, panel, x, blocks, sum); break;
    case 3: ternary_tile_of(3, panel, x, blocks, sum); break;
    case 4: ternary_tile_of(4, panel, x, blocks, sum); break;
    case 5: ternary_tile_of(5, panel, x, blocks, sum); break;
    default: ternary_tile_of(6, panel, x, blocks, sum); break;
    }
}

static void byte_tile(const uint8_t *bytes, const int8_t *x, int64_t blocks, int rows, int32_t *sum)
{
    switch (rows) {
    case 1: byte_tile_of(1, bytes, x, blocks, sum); break;
    case 2: byte_tile_of(2, bytes, x, blocks, sum); break;
    case 3: byte_tile_of(3, bytes, x, blocks, sum); break;
    case 4: byte_tile_of(4, bytes, x, blocks, sum); break;
    case 5: byte_tile_of(5, bytes, x, blocks, sum); break;
    default: byte_tile_of(6, bytes, x, blocks, sum); break;
    }
}

/* Keeps the compiler from leaving out what computes a vector. */
INLINE void used(__m512i vector)
{
    __asm__ volatile("" : : "v"(vector));
}

static int64_t dot_loop(int64_t count)
{
    enum { CHAINS = 12 }; /* more than the latency times the instructions per cycle */
    __m512i acc[CHAINS], w = _mm512_set1_epi8(1), x = _mm512_set1_epi8(2);
    UNROLLED(i, CHAINS)
        acc[i] = _mm512_set1_epi32(i);
    for (int64_t done = 0; done < count; done += CHAINS)
        UNROLLED(i, CHAINS)
            acc[i] = in_register(_mm512_dpbusd_epi32(acc[i], w, x));
    UNROLLED(i, CHAINS)
        used(acc[i]);
    return (count + CHAINS - 1) / CHAINS * CHAINS * 64 * 2;
}

#define AVX512VNNI                                                                                 \
    {                                                                                              \
        .single_rows = 1, .tile_rows = TILE_ROWS, .byte_offset = 128, .ternary_row = ternary_row,  \
        .ternary_tile = ternary_tile, .byte_tile = byte_tile, .dot_loop = dot_loop                 \
    }

#endif
