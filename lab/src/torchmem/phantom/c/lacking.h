/* Macros for the stubs that cuda_calls.py generates at build time. All are weak: another file's
 * own definition of the call takes precedence. */
#pragma once

#include "phantom.h"

#define LACKING(name, code)               \
    __attribute__((weak)) int name(void); \
    int name(void) { return unsupported(#name, code); }

/* A library's text for an error. */
#define TEXT(name)                                \
    __attribute__((weak)) const char *name(void); \
    const char *name(void) { return "not supported by the phantom GPU"; }
