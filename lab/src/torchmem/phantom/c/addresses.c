/* Address space without memory behind it, and what each address range is used for. */
#define _GNU_SOURCE
#include "phantom.h"

#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static void *newest;

/* For tests, through ctypes: start of the address range that was reserved last. */
void *phantom_newest_range(void) { return newest; }

/* These addresses cannot be accessed: host code that reads device memory faults, as with a real
 * GPU. */
void *reserve_addresses(size_t size)
{
    void *ordered = reserve_in_order(size);
    if (ordered)
        return newest = ordered;
    size_t wide = size + PAGE_BYTES;
    char *start = mmap(NULL, wide, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    size_t ahead = (PAGE_BYTES - (uintptr_t)start % PAGE_BYTES) % PAGE_BYTES;
    if (ahead)
        munmap(start, ahead);
    release_addresses(start + ahead + size, PAGE_BYTES - ahead);
    return newest = start + ahead;
}

/* Whole pages only: the start of the first page may belong to the previous range. */
void release_addresses(void *start, size_t size)
{
    uintptr_t rest = (uintptr_t)sysconf(_SC_PAGESIZE) - 1, end = (uintptr_t)start + size;
    uintptr_t first = ((uintptr_t)start + rest) & ~rest;
    if (end > first)
        munmap((void *)first, end - first);
}

static void *tree;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Overlapping ranges compare equal, so that a lookup of one byte finds the range around it. */
static int compare(const void *left, const void *right)
{
    const struct range *a = left, *b = right;
    return a->end <= b->start ? -1 : a->start >= b->end ? 1 : 0;
}

/* Returns false if part of the range is in use. */
bool add_range(struct range range)
{
    struct range *copy = malloc(sizeof *copy);
    *copy = range;
    pthread_mutex_lock(&lock);
    struct range **node = tsearch(copy, &tree, compare);
    bool added = node && *node == copy;
    pthread_mutex_unlock(&lock);
    if (!added)
        free(copy);
    return added;
}

bool find_range(const void *address, struct range *found)
{
    struct range byte = {.start = (uintptr_t)address, .end = (uintptr_t)address + 1};
    pthread_mutex_lock(&lock);
    struct range **node = tfind(&byte, &tree, compare);
    if (node)
        *found = **node;
    pthread_mutex_unlock(&lock);
    return node != NULL;
}

/* Removes the range that starts exactly at this address. */
bool remove_range(const void *start, struct range *removed)
{
    struct range byte = {.start = (uintptr_t)start, .end = (uintptr_t)start + 1};
    pthread_mutex_lock(&lock);
    struct range **node = tfind(&byte, &tree, compare), *range = node ? *node : NULL;
    bool exact = range && range->start == byte.start;
    if (exact) {
        tdelete(range, &tree, compare);
        *removed = *range;
        free(range);
    }
    pthread_mutex_unlock(&lock);
    return exact;
}

bool on_device(const void *address)
{
    struct range range;
    return find_range(address, &range) && range.kind <= DEVICE_MAPPED;
}
