/* The properties of the phantom GPUs, from PHANTOM_* variables set by environment.py; by default
 * an H100 with 80 GB. */
#include "phantom.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static struct model shown;
static int gpus;
static pthread_once_t read_once = PTHREAD_ONCE_INIT;

static uint64_t setting(const char *name, uint64_t otherwise, uint64_t least, uint64_t most)
{
    const char *text = getenv(name);
    char *end;
    if (!text || !*text)
        return otherwise;
    uint64_t value = strtoull(text, &end, 10);
    if (*end || value < least || value > most)
        stop("%s=%s is not a number from %llu to %llu: start the command with python -m torchmem.phantom", name, text,
             (unsigned long long)least, (unsigned long long)most);
    return value;
}

/* "12.4" is 12040, as cudaDriverGetVersion returns it. */
static int cuda_version(void)
{
    const char *text = getenv("PHANTOM_CUDA");
    int major = 13, minor = 0;
    if (text && *text && (sscanf(text, "%d.%d", &major, &minor) != 2 || major < 12 || minor < 0 || minor > 99))
        stop("PHANTOM_CUDA=%s is not a version such as 13.0: start the command with python -m torchmem.phantom", text);
    return major * 1000 + minor * 10;
}

static void read_settings(void)
{
    const char *name = getenv("PHANTOM_NAME");
    gpus = (int)setting("PHANTOM_DEVICES", 1, 1, MAX_GPUS);
    snprintf(shown.name, sizeof shown.name, "%s", name && *name ? name : "Phantom GPU");
    shown.bytes = setting("PHANTOM_MEMORY", 80000000000ull, 1, 1ull << 46);
    shown.context_bytes = setting("PHANTOM_CONTEXT", 512ull << 20, 1, 1ull << 40);
    shown.multiprocessors = (int)setting("PHANTOM_MULTIPROCESSORS", 132, 1, 4096);
    shown.capability = (int)setting("PHANTOM_CAPABILITY", 90, 50, 999);
    shown.l2_bytes = (int)setting("PHANTOM_L2", 50 << 20, 1, 1 << 30);
    shown.machine = (int)setting("PHANTOM_MACHINE", 0, 0, 255);
    shown.cuda_version = cuda_version();
}

const struct model *model(void)
{
    pthread_once(&read_once, read_settings);
    return &shown;
}

int gpu_count(void)
{
    model();
    return gpus;
}
