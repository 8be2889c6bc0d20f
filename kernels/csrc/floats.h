/* Vectors of floats, whatever the instruction set is, and how numbers of other types become floats.
 *
 * A *word* is 16 floats, as one vector or several. What is summed along lanes is summed in 16 of
 * them, which are then added in one fixed order, whatever the vectors are; all that is not summed
 * is computed for each lane by itself. So a result depends on its operands alone: not on the shape
 * of what is computed along with it, and, among machines that have a fused multiply-add, not on the
 * instruction set. */
#ifndef MEGABIT_FLOATS_H
#define MEGABIT_FLOATS_H

#include <string.h>

#include "elementwise.h"
#include "isa.h"

/* Tiles: so many sums live in registers beside what they are made of. */
#if defined(__AVX512F__)
#include <immintrin.h>
enum { FLOAT_LANES = 16, ROW_TILE = 6, WORD_TILE = 4, DOT_ROWS = 6, DOT_COLUMNS = 4 };
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { FLOAT_LANES = 8, ROW_TILE = 6, WORD_TILE = 1, DOT_ROWS = 3, DOT_COLUMNS = 2 };
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { FLOAT_LANES = 4, ROW_TILE = 6, WORD_TILE = 1, DOT_ROWS = 3, DOT_COLUMNS = 2 };
#else
enum { FLOAT_LANES = 4, ROW_TILE = 2, WORD_TILE = 1, DOT_ROWS = 1, DOT_COLUMNS = 2 };
#endif
enum {
    WORD_VECTORS = WORD / FLOAT_LANES,
    DOT_SUMS = DOT_ROWS * DOT_COLUMNS > 4 ? DOT_ROWS *DOT_COLUMNS : 4,
};

typedef float floats __attribute__((vector_size(4 * FLOAT_LANES)));
typedef int32_t ints __attribute__((vector_size(4 * FLOAT_LANES)));

INLINE floats load_floats(const float *from)
{
    floats vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

INLINE void store_floats(float *to, floats vector)
{
    memcpy(to, &vector, sizeof vector);
}

INLINE floats all_lanes(float value)
{
#if defined(__AVX512F__)
    return (floats)_mm512_set1_ps(value);
#elif defined(__AVX2__) && defined(__FMA__)
    return (floats)_mm256_set1_ps(value);
#else
    return value - (floats){0};
#endif
}

/* a * b + c, rounded once where the processor can. */
INLINE floats multiply_add(floats a, floats b, floats c)
{
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* `yes` where a lane of `condition` is all ones, `no` where it is zero. */
INLINE floats chosen(ints condition, floats yes, floats no)
{
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

/* Of the lanes of a word: i and i + 8, then i and i + 4, i + 2, i + 1. */
INLINE float sum_of_word(const floats word[WORD_VECTORS])
{
    float lanes[WORD];
    memcpy(lanes, word, sizeof lanes);
    for (int width = WORD / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
/* Lanes i, i + 4, i + 8 and i + 12 of a word, added as sum_of_word does. */
INLINE __m128 quarter(const floats word[WORD_VECTORS])
{
#if defined(__AVX512F__)
    __m512d vector = _mm512_castps_pd((__m512)word[0]);
    __m256 half = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(vector)),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(vector, 1)));
#else
    __m256 half = _mm256_add_ps((__m256)word[0], (__m256)word[1]);
#endif
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* sum_of_word of four words at a time. */
INLINE void sums_of_four(floats words[4][WORD_VECTORS], float *out)
{
    __m128 a = quarter(words[0]), b = quarter(words[1]), c = quarter(words[2]),
           d = quarter(words[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d)));
}
#else
INLINE void sums_of_four(floats words[4][WORD_VECTORS], float *out)
{
    UNROLLED(i, 4)
        out[i] = sum_of_word(words[i]);
}
#endif

/* e^x for x <= 0, to about one unit in the last place; 0 below -87.3, NaN of NaN. With x = n ln 2 +
 * r, 2^n times the first terms of the series of e^r: what is left out is less than 6e-9. */
INLINE floats exponential(floats x)
{
    const floats round_to_integer = all_lanes(12582912.0f); /* 1.5 * 2^23 */
    floats shifted = multiply_add(x, all_lanes(1.44269504f), round_to_integer);
    floats n = shifted - round_to_integer;
    /* ln 2 in two parts, of which the first has 9 bits, so that its product with n is exact. */
    floats r = multiply_add(n, all_lanes(-0.693359375f), x);
    r = multiply_add(n, all_lanes(2.12194440e-4f), r);
    floats sum = all_lanes(1.0f / 5040.0f);
    sum = multiply_add(sum, r, all_lanes(1.0f / 720.0f));
    sum = multiply_add(sum, r, all_lanes(1.0f / 120.0f));
    sum = multiply_add(sum, r, all_lanes(1.0f / 24.0f));
    sum = multiply_add(sum, r, all_lanes(1.0f / 6.0f));
    sum = multiply_add(sum, r, all_lanes(0.5f));
    sum = multiply_add(sum, r, all_lanes(1.0f));
    sum = multiply_add(sum, r, all_lanes(1.0f));
    /* The low bits of `shifted` are n; beyond them, what is shifted out. */
    ints power = (ints)(((ints)shifted << 23) + 0x3f800000);
    return chosen((ints)(x < all_lanes(-87.3f)), all_lanes(0.0f), sum * (floats)power);
}

/* float16 to float, exactly: its exponent is 112 less. */
INLINE float widened_half(uint16_t half)
{
    int32_t magnitude = (half & 0x7fff) << 13;
    int32_t bits = bits_of(float_of(magnitude) * 0x1p112f);
    bits |= (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return float_of(bits | (int32_t)((uint32_t)(half & 0x8000) << 16));
}

/* To float16, ties to even. */
INLINE uint16_t narrowed_half(float value)
{
    uint32_t bits = (uint32_t)bits_of(value), magnitude = bits & 0x7fffffff, half;
    if (magnitude > 0x7f800000)
        half = 0x7e00;
    else if (magnitude >= 0x477ff000)
        half = 0x7c00;               /* 65520 and more */
    else if (magnitude < 0x38800000) /* below 2^-14: a unit of the sum is one of the result */
        half = (uint32_t)bits_of(float_of((int32_t)magnitude) + 0.5f) - 0x3f000000;
    else
        half = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

INLINE float widened_as(int type, const void *from, int64_t at)
{
    if (type == MEGABIT_FLOAT32)
        return ((const float *)from)[at];
    if (type == MEGABIT_BFLOAT16)
        return widened(((const uint16_t *)from)[at]);
    if (type == MEGABIT_FLOAT16)
        return widened_half(((const uint16_t *)from)[at]);
    return (float)((const int8_t *)from)[at];
}

/* A vector of any type as floats. */
INLINE floats load_as(int type, const void *from)
{
    typedef uint16_t halves __attribute__((vector_size(2 * FLOAT_LANES)));
    typedef int8_t bytes __attribute__((vector_size(FLOAT_LANES)));
    typedef uint32_t words __attribute__((vector_size(4 * FLOAT_LANES)));
    if (type == MEGABIT_FLOAT32)
        return load_floats(from);
    if (type == MEGABIT_INT8) {
        bytes values;
        memcpy(&values, from, sizeof values);
        return __builtin_convertvector(__builtin_convertvector(values, ints), floats);
    }
    halves values;
    memcpy(&values, from, sizeof values);
    words bits = __builtin_convertvector(values, words);
    if (type == MEGABIT_BFLOAT16)
        return (floats)(bits << 16);
    words magnitude = (words)((floats)((bits & 0x7fff) << 13) * 0x1p112f);
    words special = (words)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (floats)(magnitude | special | (bits & 0x8000) << 16);
}

INLINE void widen_as(int type, const void *from, int64_t count, float *out)
{
    const char *bytes = from;
    const int64_t size = type == MEGABIT_FLOAT32 ? 4 : type == MEGABIT_INT8 ? 1 : 2;
    int64_t i = 0;
    for (; i + FLOAT_LANES <= count; i += FLOAT_LANES)
        store_floats(out + i, load_as(type, bytes + size * i));
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++)
            out[i + j] = widened_as(type, bytes + size * i, j);
    for (; i < count; i++)
        out[i] = widened_as(type, bytes, i);
}

/* Rows of any type, `from_stride` elements apart, to rows of floats. */
static void widen_rows(const void *from, int type, int64_t from_stride, int64_t rows, int64_t count,
                       float *out, int64_t out_stride)
{
    const char *bytes = from;
    for (int64_t row = 0; row < rows; row++, out += out_stride) {
        switch (type) {
        case MEGABIT_FLOAT32: widen_as(MEGABIT_FLOAT32, bytes, count, out); break;
        case MEGABIT_BFLOAT16: widen_as(MEGABIT_BFLOAT16, bytes, count, out); break;
        case MEGABIT_FLOAT16: widen_as(MEGABIT_FLOAT16, bytes, count, out); break;
        default: widen_as(MEGABIT_INT8, bytes, count, out); break;
        }
        bytes += from_stride * (type == MEGABIT_FLOAT32 ? 4 : type == MEGABIT_INT8 ? 1 : 2);
    }
}

/* x / divisor in a type of floats. */
static void narrow_row(const float *x, float divisor, int64_t count, int type, void *out)
{
    if (type == MEGABIT_FLOAT32)
        for (int64_t i = 0; i < count; i++)
            ((float *)out)[i] = x[i] / divisor;
    else if (type == MEGABIT_BFLOAT16)
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)out)[i] = narrowed(x[i] / divisor);
    else
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)out)[i] = narrowed_half(x[i] / divisor);
}

/* out[i] *= factor[i] */
static void scale_row(float *out, const float *factor, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        out[i] *= factor[i];
}

#endif
