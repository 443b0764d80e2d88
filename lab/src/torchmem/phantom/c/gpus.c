/* The GPUs of the machine: free memory, names, and which of them this process sees. */
#include "phantom.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

uint64_t gpu_bytes(void) { return model()->bytes; }

uint64_t gpu_free_bytes(int gpu)
{
    uint64_t used = bytes_on(gpu);
    return used < gpu_bytes() ? gpu_bytes() - used : 0;
}

void gpu_uuid(int gpu, unsigned char uuid[16])
{
    memcpy(uuid, "\0\0phantom-gpu\0\0\0", 16);
    uuid[0] = uuid[15] = (unsigned char)gpu;
    uuid[1] = (unsigned char)model()->machine;
}

void gpu_uuid_text(int gpu, char text[48])
{
    unsigned char id[16];
    gpu_uuid(gpu, id);
    int length = snprintf(text, 48, "GPU-");
    for (int byte = 0; byte < 16; byte++) {
        bool dash = byte == 4 || byte == 6 || byte == 8 || byte == 10;
        length += snprintf(text + length, 48 - (size_t)length, dash ? "-%02x" : "%02x", id[byte]);
    }
}

void gpu_pci_text(int gpu, char text[16])
{
    snprintf(text, 16, "0000:%02x:00.0", (unsigned char)(gpu + 1));
}

/* A unique prefix of the UUID is enough, as in CUDA_VISIBLE_DEVICES. Returns -1 if no GPU
 * matches. */
int gpu_with_uuid(const char *text)
{
    char uuid[48];
    for (int gpu = 0; gpu < gpu_count(); gpu++) {
        gpu_uuid_text(gpu, uuid);
        if (strncasecmp(uuid, text, strlen(text)) == 0)
            return gpu;
    }
    return -1;
}

static int visible[MAX_GPUS], visible_count;
static pthread_once_t listed = PTHREAD_ONCE_INIT;

static int gpu_named(const char *name)
{
    char *end;
    long index = strtol(name, &end, 10);
    if (strncasecmp(name, "GPU-", 4) == 0)
        return gpu_with_uuid(name);
    return end > name && index >= 0 && index < gpu_count() ? (int)index : -1;
}

/* As in the driver, an unknown name hides itself and all names after it. */
static void list_visible(void)
{
    char names[1024], *rest = names;
    const char *set = getenv("CUDA_VISIBLE_DEVICES");
    for (int gpu = 0; !set && gpu < gpu_count(); gpu++)
        visible[visible_count++] = gpu;
    snprintf(names, sizeof names, "%s", set ? set : "");
    for (char *name; set && visible_count < MAX_GPUS && (name = strsep(&rest, ","));) {
        int gpu = gpu_named(name);
        if (gpu < 0)
            return;
        visible[visible_count++] = gpu;
    }
}

int device_count(void)
{
    pthread_once(&listed, list_visible);
    return visible_count;
}

int gpu_of(int device) { return device >= 0 && device < device_count() ? visible[device] : -1; }

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* Takes the memory of a CUDA context, once. Returns false if the GPU has no room for it. */
bool open_context(int gpu)
{
    pthread_mutex_lock(&opening);
    bool open = process_bytes(gpu) > 0 || process_take(gpu, model()->context_bytes, gpu_bytes());
    pthread_mutex_unlock(&opening);
    return open;
}
