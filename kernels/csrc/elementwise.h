/* Elementwise loops in plain C. Each isa_*.c includes them, so that the compiler vectorises them
 * for its instruction set. The arithmetic is that of numerics.py, bit for bit: one IEEE operation
 * for each of torch's, nothing contracted (native_build.py sees to the flags). */
#ifndef MEGABIT_ELEMENTWISE_H
#define MEGABIT_ELEMENTWISE_H

#include <string.h>

#include "isa.h"

INLINE int32_t bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float widened(uint16_t bfloat16)
{
    return float_of((int32_t)((uint32_t)bfloat16 << 16));
}

/* To bfloat16, ties to even. A NaN becomes the quiet one, since rounding could make it infinite. */
INLINE uint16_t narrowed(float value)
{
    uint32_t bits = (uint32_t)bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value == value ? (uint16_t)rounded : 0x7fc0;
}

static int32_t sum_int8(const int8_t *x, int64_t count)
{
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += x[i];
    return sum;
}

/* In unsigned arithmetic: sums of int8 products may have wrapped. */
INLINE int32_t without_offset(int32_t sum, int32_t offset)
{
    return (int32_t)((uint32_t)sum - (uint32_t)offset);
}

static void store_int32(const int32_t *restrict sum, int32_t offset, int64_t count,
                        int32_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = without_offset(sum[i], offset);
}

static void store_float32(const int32_t *restrict sum, int32_t offset, float x_scale,
                          const float *restrict w_scale, int64_t count, float *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)without_offset(sum[i], offset) * (x_scale * w_scale[i]);
}

static void store_bfloat16(const int32_t *restrict sum, int32_t offset, float x_scale,
                           const float *restrict w_scale, int64_t count, uint16_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = narrowed((float)without_offset(sum[i], offset) * (x_scale * w_scale[i]));
}

/* Magnitudes are compared as integers: the order is the same, and NaN counts as the largest. */
static float absmax_float32(const float *x, int64_t count)
{
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(largest);
}

static float absmax_bfloat16(const uint16_t *x, int64_t count)
{
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = x[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return widened(largest);
}

/* clamp(round(x / scale), -128, 127), NaN as 0. */
INLINE int8_t quantized(float x, float scale)
{
    /* Adding this rounds a small number to an integer, ties to even, without SSE4.1's `round`. */
    const float round_to_integer = 12582912.0f; /* 1.5 * 2^23 */
    float quotient = x / scale;
    float clamped = quotient > -128.0f ? quotient : -128.0f;
    clamped = clamped < 127.0f ? clamped : 127.0f;
    float rounded = (clamped + round_to_integer) - round_to_integer;
    return quotient == quotient ? (int8_t)(int32_t)rounded : 0;
}

static void quantize_float32(const float *restrict x, float scale, int64_t count,
                             int8_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = quantized(x[i], scale);
}

static void quantize_bfloat16(const uint16_t *restrict x, float scale, int64_t count,
                              int8_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = quantized(widened(x[i]), scale);
}

/* Rounding to nearest, ties to even, then clamping to -1..1 is this comparison; NaN gives 0. */
static void ternarize(const float *restrict weight, float scale, int64_t count,
                      int8_t *restrict codes)
{
    for (int64_t i = 0; i < count; i++) {
        float quotient = weight[i] / scale;
        codes[i] = (int8_t)((quotient > 0.5f) - (quotient < -0.5f));
    }
}

/* The 16 codes -1, 0, 1 of each block to one word, as weights.c has it. */
static void pack_words(const int8_t *restrict codes, int64_t blocks, uint32_t *restrict words)
{
    const uint32_t low_bits = 0x7f7f7f7f, high_bits = 0x80808080, ones = 0x01010101;
    for (int64_t block = 0; block < blocks; block++) {
        uint32_t word = 0;
        for (int plane = 0; plane < QUADS_PER_BLOCK; plane++) {
            uint32_t quad;
            memcpy(&quad, codes + BLOCK_K * block + QUAD * plane, sizeof quad);
            /* Adds one to each byte, 0xff, 0x00 or 0x01, without a carry into the next. */
            word |= (((quad & low_bits) + ones) ^ (quad & high_bits)) << 2 * plane;
        }
        words[block] = word;
    }
}

static void widen_int8(const uint8_t *restrict codes, int64_t count, int8_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = (int8_t)(codes[i] - 1);
}

static void widen_float32(const uint8_t *restrict codes, int64_t count, float *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)(codes[i] - 1);
}

static void widen_bfloat16(const uint8_t *restrict codes, int64_t count, uint16_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = (uint16_t)((uint32_t)bits_of((float)(codes[i] - 1)) >> 16);
}

static uint64_t read_words(const uint64_t *words, int64_t count)
{
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; i++)
        bits |= words[i];
    return bits;
}

#define ELEMENTWISE                                                                                \
    {                                                                                              \
        sum_int8, store_int32, store_float32, store_bfloat16, absmax_float32, absmax_bfloat16,     \
            quantize_float32, quantize_bfloat16, ternarize, pack_words, widen_int8, widen_float32, \
            widen_bfloat16, read_words                                                             \
    }

#endif
