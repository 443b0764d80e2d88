/* Events: the lines `event.N = GPU TYPE DATA` of the node, each delivered once to a set that registered for it. */
#include "file.h"

#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

/* A wait sleeps until the file's folder changes, as a driver sleeps until an interrupt. It also looks again after a
   second in a process that named the file after its start: such a process is a test, which may name another file. */
enum { MAX_REGISTERED = 64, LOOK_MILLISECONDS = 1000, STEP_MILLISECONDS = 2 };

struct event_set {
    int count;
    struct {
        nvmlDevice_t device;
        u64 types;
    } registered[MAX_REGISTERED];
};

static unsigned delivered, delivered_of_file;

NVML(EventSetCreate, nvmlEventSet_t *set)
{
    *set = calloc(1, sizeof **set);
    return answer("nvmlEventSetCreate", NULL, NULL, NULL);
}

NVML(EventSetFree, nvmlEventSet_t set)
{
    free(set);
    return answer("nvmlEventSetFree", NULL, NULL, NULL);
}

NVML(DeviceRegisterEvents, nvmlDevice_t device, u64 types, nvmlEventSet_t set)
{
    u64 supported = 0;
    nvmlReturn_t code =
        numbers("nvmlDeviceRegisterEvents", device, "SupportedEventTypes", 0, 1, &supported);
    if (code || types & ~supported || set->count == MAX_REGISTERED)
        return code ? code : NOT_SUPPORTED;
    set->registered[set->count].device = device;
    set->registered[set->count++].types = types;
    return SUCCESS;
}

static u64 types_of(nvmlEventSet_t set, nvmlDevice_t device)
{
    u64 types = 0;
    for (int i = 0; i < set->count; i++)
        types |= set->registered[i].device == device ? set->registered[i].types : 0;
    return types;
}

/* The next event that this set is registered for; all others are lost, as with the driver. */
static nvmlReturn_t next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    if (delivered_of_file != file_number)
        delivered = 0, delivered_of_file = file_number;
    for (;;) {
        char key[32], name[32];
        u64 found[3];
        snprintf(key, sizeof key, "event.%u", delivered + 1);
        nvmlReturn_t code = numbers("nvmlEventSetWait_v2", NULL, key, 0, 3, found);
        if (code)
            return code == NOT_SUPPORTED ? TIMEOUT : code;
        delivered++;
        snprintf(name, sizeof name, "gpu %u", (unsigned)found[0]);
        nvmlDevice_t device = device_named(name);
        if (device && types_of(set, device) & found[1]) {
            *data = (nvmlEventData_t){device, found[1], found[2], ~0u, ~0u};
            return SUCCESS;
        }
    }
}

static long long milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static int was_started_with(const char *variable)
{
    static char environment[1 << 17];
    static ssize_t size = -1;
    if (size < 0) {
        int descriptor = open("/proc/self/environ", O_RDONLY | O_CLOEXEC);
        size = descriptor < 0 ? 0 : read(descriptor, environment, sizeof environment - 1);
        if (descriptor >= 0)
            close(descriptor);
    }
    size_t length = strlen(variable);
    for (char *entry = environment; entry < environment + size; entry += strlen(entry) + 1)
        if (!strncmp(entry, variable, length) && entry[length] == '=')
            return 1;
    return 0;
}

/* A descriptor that is readable once the file has changed, or -1. */
static int watched_file(void)
{
    char folder[PATH_MAX];
    const char *path = getenv("FAKE_NVML_STATE");
    int descriptor = path ? inotify_init1(IN_CLOEXEC | IN_NONBLOCK) : -1;
    if (descriptor >= 0) {
        snprintf(folder, sizeof folder, "%s", path);
        inotify_add_watch(descriptor, dirname(folder), IN_MODIFY | IN_MOVED_TO | IN_CREATE);
    }
    return descriptor;
}

/* Whether the file is among what has changed in its folder, where its log is, too. */
static int has_changed(int descriptor)
{
    _Alignas(struct inotify_event) char changes[4096];
    char path[PATH_MAX];
    const char *state = getenv("FAKE_NVML_STATE");
    snprintf(path, sizeof path, "%s", state ? state : "");
    const char *name = basename(path);
    int found = 0;
    ssize_t size;
    while ((size = read(descriptor, changes, sizeof changes)) > 0)
        for (char *at = changes; at < changes + size;) {
            struct inotify_event *change = (struct inotify_event *)at;
            found |= !change->len || !strcmp(change->name, name);
            at += sizeof *change + change->len;
        }
    return found;
}

/* Sleep until the file may have changed. */
static void sleep_until(long long end, int changes, int longest)
{
    for (long long left; (left = end - milliseconds()) > 0;) {
        poll(&(struct pollfd){.fd = changes, .events = POLLIN}, 1, left < longest ? (int)left : longest);
        if (changes < 0 || has_changed(changes) || longest < left)
            return;
    }
}

NVML(EventSetWait_v2, nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_milliseconds)
{
    long long end = milliseconds() + timeout_milliseconds;
    int is_fixed = was_started_with("FAKE_NVML_STATE");
    int changes = timeout_milliseconds ? watched_file() : -1;
    nvmlReturn_t code;
    while ((code = next_event(set, data)) == TIMEOUT && milliseconds() < end) {
        sleep_until(end, changes, changes < 0 ? STEP_MILLISECONDS : is_fixed ? INT_MAX : LOOK_MILLISECONDS);
        if (changes >= 0 && !is_fixed) {
            close(changes);
            changes = watched_file();
        }
    }
    if (changes >= 0)
        close(changes);
    return code;
}
