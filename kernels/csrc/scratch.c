#define _GNU_SOURCE
#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

static const size_t HUGE_PAGE = 2 << 20;

struct buffers {
    void *data[SCRATCH_USES];
    size_t bytes[SCRATCH_USES];
};

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void free_buffers(void *argument)
{
    struct buffers *buffers = argument;
    for (int use = 0; use < SCRATCH_USES; use++)
        free(buffers->data[use]);
    free(buffers);
}

static void make_key(void)
{
    pthread_key_create(&key, free_buffers);
}

static struct buffers *buffers_of_thread(void)
{
    static _Thread_local struct buffers *own;
    if (own == NULL) {
        pthread_once(&once, make_key);
        own = calloc(1, sizeof *own);
        pthread_setspecific(key, own); /* frees them at the end of the thread */
    }
    return own;
}

static void *allocate(size_t bytes)
{
    void *data = NULL;
    if (posix_memalign(&data, bytes < HUGE_PAGE ? 64 : HUGE_PAGE, bytes) != 0)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_PAGE)
        madvise(data, bytes, MADV_HUGEPAGE); /* advice only: it may fail */
#endif
    return data;
}

void *scratch(enum scratch_use use, size_t bytes)
{
    struct buffers *own = buffers_of_thread();
    if (own == NULL)
        return NULL;
    if (bytes > own->bytes[use] || own->data[use] == NULL) {
        free(own->data[use]);
        own->data[use] = allocate(bytes > 0 ? bytes : 1);
        own->bytes[use] = own->data[use] == NULL ? 0 : bytes;
    }
    return own->data[use];
}
