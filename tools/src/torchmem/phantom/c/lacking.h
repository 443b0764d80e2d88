/* For the list of calls that lacking.py writes at build time. All are weak: where another file has the call, its own
 * definition is taken. */
#pragma once

#include "phantom.h"

#define LACKING(name, code)                 \
    __attribute__((weak)) int name(void);   \
    int name(void) { return unsupported(#name, code); }

/* What a library says about an error. */
#define TEXT(name)                                \
    __attribute__((weak)) const char *name(void); \
    const char *name(void) { return "not supported by the phantom GPU"; }
