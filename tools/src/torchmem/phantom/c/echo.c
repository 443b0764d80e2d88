/* What the host wrote to a card and no work on the card can have changed: this alone is read back as it was, all else
 * that comes from a card is zero. DistributedDataParallel sends shapes and bucket numbers around this way. */
#include "phantom.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MOST_ECHOES = 1024 };

static struct echo {
    uintptr_t start;
    size_t size;
    char *bytes;
} echoes[MOST_ECHOES];
static char arena[4 * ECHO_BYTES];
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
    for (struct echo *echo = echoes; echo < echoes + count; echo++)
        if (echo->start < start + size && start < echo->start + echo->size)
            echo->size = 0;
}

/* Room for an echo of that size, NULL when it is too large. A full arena is given up: what is old was read or never is. */
static char *room_for(size_t size)
{
    if (size == 0 || size > ECHO_BYTES)
        return NULL;
    if (used + size > sizeof arena || count == MOST_ECHOES)
        forget_all();
    return arena + used;
}

static void add(uintptr_t start, size_t size)
{
    echoes[count++] = (struct echo){.start = start, .size = size, .bytes = arena + used};
    used += size;
}

/* False when some byte is not known; it is zero then. */
static bool read_into(char *to, uintptr_t start, size_t size)
{
    size_t known = 0;
    memset(to, 0, size);
    for (struct echo *echo = echoes; echo < echoes + count; echo++) {
        uintptr_t first = start > echo->start ? start : echo->start;
        uintptr_t end = start + size < echo->start + echo->size ? start + size : echo->start + echo->size;
        if (first >= end)
            continue;
        memcpy(to + (first - start), echo->bytes + (first - echo->start), end - first);
        known += end - first;
    }
    return known == size;
}

void keep_echo(const void *device, const void *host, size_t size)
{
    forget_verdict();
    pthread_mutex_lock(&lock);
    drop((uintptr_t)device, size);
    char *room = room_for(size);
    if (room) {
        memcpy(room, host, size);
        add((uintptr_t)device, size);
    }
    pthread_mutex_unlock(&lock);
}

void read_echo(void *host, const void *device, size_t size)
{
    pthread_mutex_lock(&lock);
    read_into(host, (uintptr_t)device, size);
    pthread_mutex_unlock(&lock);
}

void copy_echo(void *to, const void *from, size_t size)
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

void forget_echo(const void *device, size_t size)
{
    pthread_mutex_lock(&lock);
    drop((uintptr_t)device, size);
    pthread_mutex_unlock(&lock);
}

void forget_echoes(void)
{
    forget_verdict();
    if (count == 0)
        return;
    pthread_mutex_lock(&lock);
    forget_all();
    pthread_mutex_unlock(&lock);
}
