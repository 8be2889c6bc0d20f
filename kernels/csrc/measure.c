/* What the machine can do at best: the roofline that benchmarks compare with. */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <time.h>

#include "isa.h"
#include "threads.h"

static const int64_t LOOP_DOTS = 1 << 20;
static const int64_t TASK_WORDS = 1 << 15;    /* 256 KiB */
static const int64_t PORTION_WORDS = 1 << 23; /* 64 MiB */

struct measurement {
    const struct isa *isa;
    const uint64_t *words;
    int64_t count;
    _Atomic int64_t operations;
    _Atomic uint64_t bits; /* so that the compiler cannot leave the reading out */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void multiply(void *context, int64_t begin, int64_t end)
{
    struct measurement *m = context;
    for (int64_t task = begin; task < end; task++)
        atomic_fetch_add(&m->operations, m->isa->micro.dot_loop(LOOP_DOTS));
}

int megabit_measure_dot_peak(const struct isa *isa, double *gops, double seconds, int threads)
{
    double best = 0, start = now();
    do { /* the best of many short loops: others may use the processor, too */
        struct measurement m = {.isa = isa};
        double begin = now();
        parallel_for(16 * (int64_t)threads, threads, multiply, &m);
        double rate = 1e-9 * (double)m.operations / (now() - begin);
        best = rate > best ? rate : best;
    } while (now() - start < seconds);
    *gops = best;
    return MEGABIT_OK;
}

static void read_tasks(void *context, int64_t begin, int64_t end)
{
    struct measurement *m = context;
    int64_t first = begin * TASK_WORDS, last = end * TASK_WORDS;
    last = last < m->count ? last : m->count;
    atomic_fetch_or(&m->bits, m->isa->elementwise.read(m->words + first, last - first));
}

int megabit_measure_read_bandwidth(const struct isa *isa, double *gigabytes_per_second,
                                   const void *buffer, int64_t bytes, int repetitions, int threads)
{
    double best = 0;
    for (int i = 0; i < repetitions; i++)
        for (int64_t first = 0; first < bytes / 8; first += PORTION_WORDS) {
            int64_t left = bytes / 8 - first, count = left < PORTION_WORDS ? left : PORTION_WORDS;
            struct measurement m = {
                .isa = isa, .words = (const uint64_t *)buffer + first, .count = count};
            double begin = now();
            parallel_for((count + TASK_WORDS - 1) / TASK_WORDS, threads, read_tasks, &m);
            double rate = 8e-9 * (double)count / (now() - begin);
            best = rate > best ? rate : best;
        }
    *gigabytes_per_second = best;
    return MEGABIT_OK;
}
