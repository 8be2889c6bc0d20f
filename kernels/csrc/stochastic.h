/* The definition of stochastic rounding, stochastic.py, bit for bit. */
#ifndef MEGABIT_STOCHASTIC_H
#define MEGABIT_STOCHASTIC_H

#include <stdint.h>

#define STOCHASTIC_INLINE static inline __attribute__((always_inline))

/* What keys the noise of one row. */
struct noise_row {
    uint32_t start, flip;
};

/* A bijection of 32-bit words (lowbias32 by C. Wellons, public domain). */
STOCHASTIC_INLINE uint32_t mixed(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x *= 0x846ca68b;
    return x ^ x >> 16;
}

STOCHASTIC_INLINE struct noise_row noise_of_row(uint64_t key, int64_t row)
{
    uint32_t start = mixed((uint32_t)row + (uint32_t)key);
    return (struct noise_row){start, mixed(start + (uint32_t)(key >> 32))};
}

/* clamp(x / scale, -127, 127) rounded down, or up where the noise of this column is below what that
 * takes away; NaN as 0. */
STOCHASTIC_INLINE int8_t stochastically(float x, float scale, struct noise_row row, uint32_t column)
{
    const float round_to_integer = 12582912.0f; /* 1.5 * 2^23 */
    float quotient = x / scale;
    float clamped = quotient > -127.0f ? quotient : -127.0f;
    clamped = clamped < 127.0f ? clamped : 127.0f;
    float nearest = (clamped + round_to_integer) - round_to_integer;
    float above = clamped - nearest; /* -0.5 to 0.5 */
    int32_t is_below = above < 0.0f ? 1 : 0;
    float chance = (above < 0.0f ? above + 1.0f : above) * 16777216.0f; /* 2^24 */
    int32_t draw = (int32_t)((mixed(row.start + column) ^ row.flip) >> 8);
    int32_t is_up = (float)draw < chance ? 1 : 0;
    int32_t rounded = (int32_t)nearest - is_below + is_up;
    return quotient == quotient ? (int8_t)rounded : 0;
}

#endif
