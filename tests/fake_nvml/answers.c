#include "file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PAUSE_NANOSECONDS = 2000000 };

static int initializations;

/* The value in the device's own section, or else in the one for all of its kind. */
static const char *value_of(const struct section *section, const char *key)
{
    const char *own = value_in(section, key);
    if (own || !strcmp(section->name, "node"))
        return own;
    return value_in(section_named(strncmp(section->name, "mig", 3) ? "gpu *" : "mig *"), key);
}

/* The return code that the section has for everything or for this function. */
static int failure_in(const struct section *section, const char *function)
{
    const char *values[] = {value_of(section, "error"), value_of(section, function)};
    for (int i = 0; i < 2; i++) {
        int code = values[i] ? code_of(values[i], strlen(values[i])) : 0;
        if (code == NOT_A_CODE)
            stop("no return code", values[i]);
        if (code)
            return code;
    }
    return SUCCESS;
}

static int look(const char *function, nvmlDevice_t device, const char *key, char text[MAX_TEXT])
{
    const struct section *section = section_named("node");
    int code = failure_in(section, function);
    if (code)
        return code;
    if (!initializations && strncmp(function, "nvmlInit", 8))
        return UNINITIALIZED;
    if (device) {
        section = section_of(device);
        if (!section)
            return strncmp(device->uuid, "MIG", 3) ? GPU_IS_LOST : INVALID_ARGUMENT;
        code = failure_in(section, function);
    }
    const char *value = key && !code ? value_of(section, key) : "";
    if (code || !value)
        return code ? code : NOT_SUPPORTED;
    if (key) {
        if (strlen(value) >= MAX_TEXT)
            stop("value too long", key);
        strcpy(text, value);
        code = code_of(value, strlen(value));
    }
    return code == NOT_A_CODE ? SUCCESS : code;
}

void log_call(const char *function)
{
    const char *path = getenv("FAKE_NVML_LOG");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    char line[128];
    int length = snprintf(line, sizeof line, "%s\n", function);
    if (file >= 0 && (write(file, line, (size_t)length) < length || close(file)))
        stop("cannot write", path);
}

nvmlReturn_t answer(const char *function, nvmlDevice_t device, const char *key, char text[MAX_TEXT])
{
    log_call(function);
    for (;;) {
        pthread_mutex_lock(&lock);
        refresh();
        int code = look(function, device, key, text);
        pthread_mutex_unlock(&lock);
        if (code != HANG)
            return code;
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NANOSECONDS}, NULL);
    }
}

nvmlDevice_t device_named(const char *name)
{
    pthread_mutex_lock(&lock);
    refresh();
    const struct section *section = section_named(name);
    nvmlDevice_t device = section ? section->device : NULL;
    pthread_mutex_unlock(&lock);
    return device;
}

nvmlDevice_t device_with_uuid(const char *uuid)
{
    pthread_mutex_lock(&lock);
    refresh();
    nvmlDevice_t device = NULL;
    for (int i = 0; i < section_count && !device; i++)
        if (!strcmp(sections[i].device->uuid, uuid))
            device = sections[i].device;
    pthread_mutex_unlock(&lock);
    return device;
}

bool name_of(nvmlDevice_t device, char name[64])
{
    pthread_mutex_lock(&lock);
    refresh();
    const struct section *section = section_of(device);
    snprintf(name, 64, "%s", section ? section->name : "");
    pthread_mutex_unlock(&lock);
    return section;
}

unsigned gpu_count(void)
{
    unsigned count = 0;
    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < section_count; i++)
        count += !strncmp(sections[i].name, "gpu ", 4) && strcmp(sections[i].name, "gpu *");
    pthread_mutex_unlock(&lock);
    return count;
}

void initialize(int change)
{
    pthread_mutex_lock(&lock);
    initializations += change;
    pthread_mutex_unlock(&lock);
}
