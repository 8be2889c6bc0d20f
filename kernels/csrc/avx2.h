/* What the two 256-bit instruction sets share. A panel of 64 rows is eight vectors wide; with 16
 * registers, tiles take two of them at a time. */
#ifndef MEGABIT_AVX2_H
#define MEGABIT_AVX2_H

#include <immintrin.h>

#include "elementwise.h"
#include "isa.h"

enum { VECTOR_BYTES = 32, VECTOR_LANES = 8, VECTORS = PANEL_ROWS / VECTOR_LANES };

INLINE __m256i load(const void *from)
{
    return _mm256_loadu_si256(from);
}

INLINE void store(void *to, __m256i vector)
{
    _mm256_storeu_si256(to, vector);
}

/* The quad at x in each lane. */
INLINE __m256i broadcast(const int8_t *x)
{
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return _mm256_set1_epi32(quad);
}

/* The codes of one plane. */
INLINE __m256i codes_of(__m256i packed, int plane)
{
    return _mm256_and_si256(_mm256_srli_epi16(packed, 2 * plane), _mm256_set1_epi8(0x03));
}

/* Keeps the compiler from reading a vector again for each of its uses. */
INLINE __m256i in_register(__m256i vector)
{
    __asm__("" : "+x"(vector));
    return vector;
}

/* Keeps the compiler from leaving out what computes a vector. */
INLINE void used(__m256i vector)
{
    __asm__ volatile("" : : "x"(vector));
}

static void unpack(const uint8_t *panel, int64_t blocks, uint8_t *codes)
{
    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK) {
        for (int v = 0; v < VECTORS; v++) {
            __m256i packed = load(panel + VECTOR_BYTES * v);
            UNROLLED(plane, QUADS_PER_BLOCK)
                store(codes + QUAD_BYTES * plane + VECTOR_BYTES * v, codes_of(packed, plane));
        }
        codes += BYTE_BLOCK;
    }
}

#endif
