/* Sums that no order changes: each element is rounded to a multiple of one unit, which integers
 * count. What is summed at a time stays in cache, where it may be read again. */

#include <stdatomic.h>

#include "isa.h"
#include "threads.h"

enum { BLOCK = 4096 };

static const float MAX_COUNTED = 65536.0f;
static const int64_t NOT_COUNTED = (int64_t)1 << 49;

struct sums {
    const struct isa *isa;
    const float *x;
    int64_t count;
    double units[2]; /* to one, for each lane */
    double shrink;
    double square_units;
    _Atomic int64_t lanes[2];
    _Atomic int not_counted;
};

static void sum_magnitudes(void *context, int64_t begin, int64_t end)
{
    struct sums *s = context;
    const struct elementwise *elementwise = &s->isa->elementwise;
    int64_t lanes[2] = {0, 0};
    for (int64_t block = begin; block < end; block++) {
        const float *x = s->x + block * BLOCK;
        int64_t count = smaller(BLOCK, s->count - block * BLOCK);
        float largest = elementwise->absmax_float32(x, count);
        if (!(largest < MAX_COUNTED)) {
            atomic_store(&s->not_counted, 1);
            return;
        }
        lanes[0] += elementwise->sum_units(x, count, 0.0f, 1.0f, s->units[0]);
        if (largest >= 1.0f)
            lanes[1] += elementwise->sum_units(x, count, 1.0f, MAX_COUNTED, s->units[1]);
    }
    atomic_fetch_add(&s->lanes[0], lanes[0]);
    atomic_fetch_add(&s->lanes[1], lanes[1]);
}

int megabit_abs_sum(const struct isa *isa, const float *x, int64_t count, double small_units,
                    double large_units, int64_t *lanes, int threads)
{
    struct sums s = {.isa = isa, .x = x, .count = count, .units = {small_units, large_units}};
    parallel_for(ceil_div(count, BLOCK), threads_for((double)count, threads), sum_magnitudes, &s);
    lanes[0] = s.not_counted ? 0 : s.lanes[0];
    lanes[1] = s.not_counted ? NOT_COUNTED : s.lanes[1];
    return MEGABIT_OK;
}

static void sum_squares(void *context, int64_t begin, int64_t end)
{
    struct sums *s = context;
    int64_t first = begin * BLOCK, last = smaller(end * BLOCK, s->count);
    atomic_fetch_add(&s->lanes[0], s->isa->elementwise.sum_squares(s->x + first, last - first,
                                                                   s->shrink, s->square_units));
}

int megabit_square_sum(const struct isa *isa, const float *x, int64_t count, double shrink,
                       double units, int64_t *total, int threads)
{
    struct sums s = {.isa = isa, .x = x, .count = count, .shrink = shrink, .square_units = units};
    parallel_for(ceil_div(count, BLOCK), threads_for((double)count, threads), sum_squares, &s);
    *total = s.lanes[0];
    return MEGABIT_OK;
}
