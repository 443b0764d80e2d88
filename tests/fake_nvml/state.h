/* The current state of the node, from the file named by FAKE_NVML_STATE. README.md describes the file. */
#pragma once

#include "nvml.h"

#include <stdbool.h>

enum { MAX_TEXT = 1 << 15, MAX_ROW = 8 };

/* What `code_of` returns for a word that is not a return code, and for `hang`. */
enum { NOT_A_CODE = -1, HANG = -2 };

/* What a handle points to: the GPU or MIG device of one UUID. Never freed. */
struct device {
    struct device *next;
    char uuid[];
};

/* One call of `function` on `device` (NULL: on the node). Wait while the file contains `hang`; then return the code that
 * the file has for the node, the device or the function, or else the text of `key` (NULL: no text). A missing key is not
 * supported. */
nvmlReturn_t answer(const char *function, nvmlDevice_t device, const char *key, char text[MAX_TEXT]);

/* Write a line to the file named by FAKE_NVML_LOG, if it is set. */
void log_call(const char *line);

/* The return code of a word of `length` bytes: a name, or # and its number. */
int code_of(const char *word, size_t length);

/* Read `count` numbers of the list `key`, from place `first` on. */
nvmlReturn_t numbers(const char *function, nvmlDevice_t device, const char *key, unsigned first, unsigned count,
                     u64 *found);

/* Copy the text of `key` to a buffer of `length` bytes. */
nvmlReturn_t give_text(const char *function, nvmlDevice_t device, const char *key, char *buffer, unsigned length);

/* Read the `a:b:c` entry at a place of a list as numbers; false past the end. */
bool row(const char *text, unsigned place, u64 fields[MAX_ROW], unsigned *count);

/* The device of section `name`, such as "gpu 3" or "mig 3/0"; NULL when there is none. */
nvmlDevice_t device_named(const char *name);
nvmlDevice_t device_with_uuid(const char *uuid);
/* The name of the device's section; false if it has none any more. */
bool name_of(nvmlDevice_t device, char name[64]);
unsigned gpu_count(void);
void initialize(int change);
