/* The state of the node, as the file named by FAKE_NVML_STATE has it now. README.md describes the file. */
#pragma once

#include "nvml.h"

#include <stdbool.h>

enum { MAX_TEXT = 1 << 15, MAX_ROW = 8 };

/* What `code_of` gives for a word that is no return code, and for `hang`. */
enum { NOT_A_CODE = -1, HANG = -2 };

/* What a handle points to: the GPU or MIG device of one UUID, for ever. */
struct device {
    struct device *next;
    char uuid[];
};

/* One call of `function` on `device` (NULL: on the node). Waits while the file says `hang`; then the return code that
 * the file gives for the node, the device or the function, else the text of `key`; NULL asks only whether it answers.
 * Without such a key: not supported. */
nvmlReturn_t answer(const char *function, nvmlDevice_t device, const char *key, char text[MAX_TEXT]);

/* One line of the file that FAKE_NVML_LOG names, if it names one. */
void log_call(const char *line);

/* The return code of that name, as far as `length`. */
int code_of(const char *word, size_t length);

/* `count` of the numbers that `key` lists, from place `first` on. */
nvmlReturn_t numbers(const char *function, nvmlDevice_t device, const char *key, unsigned first, unsigned count,
                     u64 *found);

/* The text of `key`, for a buffer of `length` bytes. */
nvmlReturn_t give_text(const char *function, nvmlDevice_t device, const char *key, char *buffer, unsigned length);

/* One `a:b:c` entry of a list as numbers, by place; false past the end. */
bool row(const char *text, unsigned place, u64 fields[MAX_ROW], unsigned *count);

/* The device of section `name`, such as "gpu 3" or "mig 3/0"; NULL when there is none. */
nvmlDevice_t device_named(const char *name);
nvmlDevice_t device_with_uuid(const char *uuid);
/* The name of the device's section; false when it has none any more. */
bool name_of(nvmlDevice_t device, char name[64]);
unsigned gpu_count(void);
void initialise(int change);
