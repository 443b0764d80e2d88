/* Keeps what the host wrote to a GPU until work on the GPU may have changed it. Only these bytes
 * read back as written; everything else read from a GPU is zero. DistributedDataParallel
 * exchanges shapes and bucket numbers this way. */
#include "phantom.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MAX_WRITES = 1024 };

static struct host_write {
    uintptr_t start;
    size_t size;
    char *bytes;
} writes[MAX_WRITES];
static char arena[4 * MAX_WRITE_BYTES];
static size_t used;
static atomic_int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void forget_all(void)
{
    count = 0;
    used = 0;
}

static void drop(uintptr_t start, size_t size)
{
    for (struct host_write *write = writes; write < writes + count; write++)
        if (write->start < start + size && start < write->start + write->size)
            write->size = 0;
}

/* Returns room for a write of that size, or NULL if it is too large. A full arena is cleared: old
 * writes were either read already or are never read. */
static char *room_for(size_t size)
{
    if (size == 0 || size > MAX_WRITE_BYTES)
        return NULL;
    if (used + size > sizeof arena || count == MAX_WRITES)
        forget_all();
    return arena + used;
}

static void add(uintptr_t start, size_t size)
{
    writes[count++] = (struct host_write){.start = start, .size = size, .bytes = arena + used};
    used += size;
}

/* Returns false if some bytes are unknown; these are zero. */
static bool read_into(char *to, uintptr_t start, size_t size)
{
    size_t known = 0;
    memset(to, 0, size);
    for (struct host_write *write = writes; write < writes + count; write++) {
        uintptr_t first = start > write->start ? start : write->start;
        uintptr_t end = start + size < write->start + write->size ? start + size : write->start + write->size;
        if (first >= end)
            continue;
        memcpy(to + (first - start), write->bytes + (first - write->start), end - first);
        known += end - first;
    }
    return known == size;
}

void keep_write(const void *device, const void *host, size_t size)
{
    keep_host_value(device, host, size);
    pthread_mutex_lock(&lock);
    drop((uintptr_t)device, size);
    char *room = room_for(size);
    if (room) {
        memcpy(room, host, size);
        add((uintptr_t)device, size);
    }
    pthread_mutex_unlock(&lock);
}

void read_back(void *host, const void *device, size_t size)
{
    pthread_mutex_lock(&lock);
    read_into(host, (uintptr_t)device, size);
    pthread_mutex_unlock(&lock);
}

void copy_write(void *to, const void *from, size_t size)
{
    if (to == from || count == 0)
        return;
    pthread_mutex_lock(&lock);
    char *room = room_for(size);
    bool known = room && read_into(room, (uintptr_t)from, size);
    drop((uintptr_t)to, size);
    if (known)
        add((uintptr_t)to, size);
    pthread_mutex_unlock(&lock);
}

void forget_write(const void *device, size_t size)
{
    forget_value(device, size);
    pthread_mutex_lock(&lock);
    drop((uintptr_t)device, size);
    pthread_mutex_unlock(&lock);
}

void forget_host_writes(void)
{
    if (count == 0)
        return;
    pthread_mutex_lock(&lock);
    forget_all();
    pthread_mutex_unlock(&lock);
}

void forget_writes(void)
{
    work_ran();
    forget_host_writes();
}
