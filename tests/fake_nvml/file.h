/* The state file, parsed: sections in order, each with its lines. Only file.c, answers.c and events.c use it. */
#pragma once

#include "state.h"

#include <pthread.h>

enum { MAX_SECTIONS = 256, MAX_ENTRIES = 160 };

struct entry {
    const char *key, *value;
};

struct section {
    const char *name;
    struct device *device;
    int entries;
    struct entry entry[MAX_ENTRIES];
};

/* Held while a section is in use. */
extern pthread_mutex_t lock;
extern struct section sections[MAX_SECTIONS];
extern int section_count;
/* Changes when FAKE_NVML_STATE names another file, that is, when another test begins. */
extern unsigned file_number;

/* Read the file again if it was replaced. */
void refresh(void);
struct section *section_named(const char *name);
struct section *section_of(const struct device *device);
/* The last value of the key; NULL when the section, which may be NULL, has none. */
const char *value_in(const struct section *section, const char *key);
/* Report a mistake in a test's file or setup on stderr and end the process. */
_Noreturn void stop(const char *problem, const char *what);
