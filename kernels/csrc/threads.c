/* The threads are those of the OpenMP runtime that the process has loaded already (torch's): a
 * second pool would fight the first for the cores. Its entry point is a weak symbol, so that this
 * library builds with any compiler and needs no OpenMP runtime of its own; without one in the
 * process, loops are serial. */

#include "threads.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

/* What compilers make of `#pragma omp parallel`; stable since GCC 4.9, in LLVM's runtime too. */
extern void GOMP_parallel(void (*function)(void *), void *argument, unsigned threads,
                          unsigned flags) __attribute__((weak));

enum { RANGES_PER_THREAD = 8 };

struct loop {
    task_range *run;
    void *context;
    int64_t tasks;
    int64_t ranges;
    _Atomic int64_t next_range;
};

static void run_ranges(void *argument)
{
    struct loop *loop = argument;
    for (;;) {
        int64_t range = atomic_fetch_add_explicit(&loop->next_range, 1, memory_order_relaxed);
        if (range >= loop->ranges)
            return;
        int64_t begin = loop->tasks * range / loop->ranges;
        int64_t end = loop->tasks * (range + 1) / loop->ranges;
        loop->run(loop->context, begin, end);
    }
}

/* The pool's threads do not survive a fork, and waiting for them would never end. Whether the
 * parent had started them, here or in torch, is not known: so only the process that loaded this
 * library uses the pool, and a fork of it computes serially. A child of a process that used torch's
 * threads before it loaded the library hangs all the same, as torch does there. */
static long loaded_by;

__attribute__((constructor)) static void remember_process(void)
{
    loaded_by = getpid();
}

static bool pool_is_usable(void)
{
    return GOMP_parallel != NULL && getpid() == loaded_by;
}

void parallel_for(int64_t tasks, int threads, task_range *run, void *context)
{
    if (tasks <= 0)
        return;
    if (threads > tasks)
        threads = (int)tasks;
    if (threads <= 1 || !pool_is_usable()) {
        run(context, 0, tasks);
        return;
    }
    int64_t ranges = (int64_t)threads * RANGES_PER_THREAD;
    struct loop loop = {run, context, tasks, ranges < tasks ? ranges : tasks, 0};
    GOMP_parallel(run_ranges, &loop, (unsigned)threads, 0);
}

int threads_for(double operations, int threads)
{
    double useful = operations / 1e6;
    return useful < threads ? (int)useful + 1 : threads;
}
