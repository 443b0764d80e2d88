/* Where new address ranges start. PyTorch's allocator depends on it, and drivers differ. */
#define _GNU_SOURCE
#include "phantom.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Addresses that neither programs nor libraries use. */
#define LOWEST ((uintptr_t)1 << 44)
#define HIGHEST ((uintptr_t)1 << 46)
#define MAX_TRIES 1000

enum order { REUSE, ASCENDING, DESCENDING, RANDOM };

static enum order order;
static uint64_t seed;
static uintptr_t above = LOWEST, below = HIGHEST;
static pthread_once_t read_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void read_order(void)
{
    const char *text = getenv("PHANTOM_ADDRESSES");
    if (!text || !*text || strcmp(text, "reuse") == 0)
        order = REUSE;
    else if (strcmp(text, "ascending") == 0)
        order = ASCENDING;
    else if (strcmp(text, "descending") == 0)
        order = DESCENDING;
    else if (sscanf(text, "random:%lu", &seed) == 1)
        order = RANDOM;
    else
        stop("PHANTOM_ADDRESSES=%s is not an order: set it to reuse, ascending, descending or random:SEED", text);
}

/* splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). */
static uint64_t next_random(void)
{
    uint64_t bits = seed += 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return bits ^ bits >> 31;
}

static uintptr_t next_start(size_t size)
{
    if (order == ASCENDING)
        return (above += size) - size;
    if (order == DESCENDING)
        return below -= size;
    return LOWEST + next_random() % ((HIGHEST - LOWEST - size) / PAGE_BYTES) * PAGE_BYTES;
}

/* A wish for cudaMalloc and cuMemAddressReserve: `size` bytes that nothing else uses, or NULL if the
 * kernel may choose, which takes the highest gap and so reuses freed addresses. */
void *reserve_in_order(size_t size)
{
    pthread_once(&read_once, read_order);
    size_t pages = (size + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (order == REUSE || pages > (HIGHEST - LOWEST) / 2)
        return NULL;
    void *reserved = MAP_FAILED;
    pthread_mutex_lock(&lock);
    for (int tries = 0; reserved == MAP_FAILED && tries < MAX_TRIES; tries++)
        reserved = mmap((void *)next_start(pages), size, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    pthread_mutex_unlock(&lock);
    return reserved == MAP_FAILED ? NULL : reserved;
}
