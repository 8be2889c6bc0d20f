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

/* round(x) of 0 <= x < 2^62, ties to even. From 2^52 on x is an integer already. */
INLINE int64_t rounded_to_int64(double x)
{
    const double round_to_integer = 4503599627370496.0; /* 2^52 */
    double rounded = (x + round_to_integer) - round_to_integer;
    return (int64_t)(x < round_to_integer ? rounded : x);
}

/* Sum of round(|x| * units) over what is from `low` on and below `high`. In doubles, which
 * compilers vectorise the conversion of. */
static int64_t sum_units(const float *x, int64_t count, float low, float high, double units)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        float magnitude = float_of(bits_of(x[i]) & 0x7fffffff);
        float counted = magnitude >= low && magnitude < high ? magnitude : 0.0f;
        sum += rounded_to_int64((double)counted * units);
    }
    return sum;
}

/* Sum of round((x * shrink)^2 * units). */
static int64_t sum_squares(const float *x, int64_t count, double shrink, double units)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        double shrunk = (double)x[i] * shrink;
        sum += rounded_to_int64(shrunk * shrunk * units);
    }
    return sum;
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

static void round_row(const float *restrict x, float scale, struct noise_row noise, int64_t count,
                      int8_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = stochastically(x[i], scale, noise, (uint32_t)i);
}

static void absmax_columns(const float *restrict x, float x_scale, int64_t count,
                           float *restrict largest)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = bits_of(x[i] * x_scale) & 0x7fffffff, before = bits_of(largest[i]);
        largest[i] = float_of(magnitude > before ? magnitude : before);
    }
}

static void round_columns(const float *restrict x, float x_scale, const float *restrict scale,
                          struct noise_row noise, uint32_t first, int64_t count,
                          int8_t *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = stochastically(x[i] * x_scale, scale[i], noise, first + (uint32_t)i);
}

/* Four rows to a quad of a byte panel; whether there is -128 in them. */
static int32_t interleave(const int8_t *restrict a, const int8_t *restrict b,
                          const int8_t *restrict c, const int8_t *restrict d, uint8_t *restrict out)
{
    const uint32_t offset = 0x80808080; /* flipping the highest bit adds 128 */
    uint32_t words[PANEL_ROWS];
    int32_t bad = 0;
    for (int i = 0; i < PANEL_ROWS; i++) {
        bad |= (a[i] == -128) | (b[i] == -128) | (c[i] == -128) | (d[i] == -128);
        words[i] = ((uint32_t)(uint8_t)a[i] | (uint32_t)(uint8_t)b[i] << 8 |
                    (uint32_t)(uint8_t)c[i] << 16 | (uint32_t)(uint8_t)d[i] << 24) ^
                   offset;
    }
    memcpy(out, words, sizeof words);
    return bad;
}

/* So many times four rows of a block of a ternary panel to quads of the transpose. */
static void turn_block(const uint8_t *restrict from, int64_t count, uint8_t *restrict to)
{
    const uint32_t low = 0x00ff00ff, mask = 0x03030303, offset = 0x7f7f7f7f; /* code - 1 + 128 */
    for (int64_t quad = 0; quad < count; quad++, from += QUAD * QUAD, to += QUAD_BYTES) {
        uint32_t row[QUAD], column[QUAD], out[QUADS_PER_BLOCK][QUAD];
        memcpy(row, from, sizeof row);
        for (int i = 0; i < 2; i++) { /* bytes of rows 0, 1 and of rows 2, 3 in turn */
            uint32_t a = row[2 * i], b = row[2 * i + 1];
            row[2 * i] = (a & low) | (b & low) << 8;
            row[2 * i + 1] = (a >> 8 & low) | (b & ~low);
        }
        for (int i = 0; i < 2; i++) {
            column[i] = (row[i] & 0xffff) | row[2 + i] << 16;
            column[2 + i] = row[i] >> 16 | (row[2 + i] & 0xffff0000);
        }
        for (int plane = 0; plane < QUADS_PER_BLOCK; plane++)
            for (int i = 0; i < QUAD; i++)
                out[plane][i] = (column[i] >> 2 * plane & mask) + offset;
        memcpy(to, out, sizeof out);
    }
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
            sum_units, sum_squares, quantize_float32, quantize_bfloat16, round_row,                \
            absmax_columns, round_columns, interleave, turn_block, ternarize, pack_words,          \
            widen_int8, widen_float32, widen_bfloat16, read_words                                  \
    }

#endif
