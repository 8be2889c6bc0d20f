/* Loops over several threads. */
#ifndef MEGABIT_THREADS_H
#define MEGABIT_THREADS_H

#include <stdint.h>

/* Does tasks begin <= t < end. */
typedef void task_range(void *context, int64_t begin, int64_t end);

/* Does tasks 0 <= t < tasks in contiguous ranges on up to so many threads, this one among them.
 * Ranges are handed out as threads become free, so that a slow thread does less. */
void parallel_for(int64_t tasks, int threads, task_range *run, void *context);

/* At most as many threads as there are portions of a million operations: fewer take longer to
 * wake up than to help. */
int threads_for(double operations, int threads);

#endif
