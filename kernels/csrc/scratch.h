/* Working memory that a thread keeps from one call to the next. */
#ifndef MEGABIT_SCRATCH_H
#define MEGABIT_SCRATCH_H

#include <stddef.h>

enum scratch_use {
    SCRATCH_ACTIVATIONS, /* of the thread that calls, read by all threads */
    SCRATCH_WEIGHTS,     /* of each thread */
    SCRATCH_SUMS,        /* of each thread */
    SCRATCH_USES,
};

/* This thread's buffer for a use, aligned to 64 bytes, of undefined content; NULL if there is no
 * memory. It is kept, so that large buffers are not mapped and cleared by the system on each call,
 * and freed when the thread ends. Callers bound what they ask for. */
void *scratch(enum scratch_use use, size_t bytes);

#endif
