/* How much of which GPU each process holds: a table in a shared file, through which processes
 * share the GPUs. */
#define _GNU_SOURCE
#include "phantom.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_PROCESSES = 256, START_BITS = 42 };

struct row {
    _Atomic uint64_t owner; /* identity() of the process, 0 if the row was never used */
    _Atomic uint64_t used[MAX_GPUS];
};

static struct row *table, *own;
static pthread_once_t opened = PTHREAD_ONCE_INIT, claimed = PTHREAD_ONCE_INIT;
static bool forked;

static void after_fork(void) { forked = own != NULL; }

static void open_table(void)
{
    char path[4096];
    state_file("processes", path);
    size_t size = MAX_PROCESSES * sizeof(struct row);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)size))
        stop("cannot use %s (%s): set PHANTOM_STATE_DIR to a directory you can write", path, strerror(errno));
    table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (table == MAP_FAILED)
        stop("cannot map %s (%s): set PHANTOM_STATE_DIR to a directory on a local disk", path,
             strerror(errno));
    close(fd);
    pthread_atfork(NULL, NULL, after_fork);
}

/* Process id and start time in one number, so that a reused pid is another process. 0 if the
 * process is dead or a zombie. */
static uint64_t identity(pid_t pid)
{
    char path[32], text[1024] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    char *field = length > 0 ? strrchr(text, ')') : NULL;
    if (!field || field[2] == 'Z' || field[2] == 'X')
        return 0;
    for (int number = 2; number < 22 && field; number++) /* proc(5): field 22 is the start time */
        field = strchr(field + 1, ' ');
    uint64_t start = field ? strtoull(field, NULL, 10) : 0;
    return (uint64_t)pid << START_BITS | (start & ((1ull << START_BITS) - 1));
}

static pid_t pid_of(uint64_t owner) { return (pid_t)(owner >> START_BITS); }

static bool alive(uint64_t owner) { return owner && identity(pid_of(owner)) == owner; }

static void claim_row(void)
{
    pthread_once(&opened, open_table);
    uint64_t mine = identity(getpid());
    for (struct row *row = table; row < table + MAX_PROCESSES; row++) {
        uint64_t owner = row->owner;
        if (alive(owner) || !atomic_compare_exchange_strong(&row->owner, &owner, mine))
            continue;
        for (int gpu = 0; gpu < MAX_GPUS; gpu++)
            row->used[gpu] = 0;
        own = row;
        return;
    }
    stop("the phantom GPUs are used by %d processes, the maximum: end some, or set another PHANTOM_STATE_DIR",
         MAX_PROCESSES);
}

/* Takes the bytes before it checks, so that two processes can never both get the last ones. */
bool process_take(int gpu, uint64_t bytes, uint64_t capacity)
{
    if (bytes > capacity)
        return false;
    pthread_once(&claimed, claim_row);
    own->used[gpu] += bytes;
    if (bytes_on(gpu) <= capacity)
        return true;
    own->used[gpu] -= bytes;
    return false;
}

void process_give(int gpu, uint64_t bytes)
{
    if (!forked)
        own->used[gpu] -= bytes;
}

uint64_t process_bytes(int gpu) { return own && !forked ? own->used[gpu] : 0; }

bool forked_with_context(void) { return forked; }

int processes_on(int gpu, struct process_memory *list, int room)
{
    int count = 0;
    pthread_once(&opened, open_table);
    for (struct row *row = table; row < table + MAX_PROCESSES; row++) {
        uint64_t bytes = row->used[gpu], owner = row->owner;
        bool ours = row == own && !forked;
        if (bytes == 0 || !(ours || alive(owner)))
            continue;
        if (count < room)
            list[count] = (struct process_memory){.pid = pid_of(owner), .bytes = bytes};
        count++;
    }
    return count;
}

uint64_t bytes_on(int gpu)
{
    struct process_memory list[MAX_PROCESSES];
    uint64_t sum = 0;
    for (int left = processes_on(gpu, list, MAX_PROCESSES); left > 0; left--)
        sum += list[left - 1].bytes;
    return sum;
}
