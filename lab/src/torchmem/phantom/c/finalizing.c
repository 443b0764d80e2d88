/* Before 3.14, Python ends a thread that requests the GIL during interpreter shutdown with
 * pthread_exit (gh-87135). If PyTorch's autograd thread is inside a C++ destructor at that time,
 * which must not unwind, the process aborts and the script's own error is lost. This also happens
 * with a real GPU, but here the script ends as soon as backward returns. Therefore do what Python
 * 3.14 does: block the thread until the process ends. */
#define _GNU_SOURCE
#include "phantom.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static bool python_finalizes(void)
{
    int (*asked)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsFinalizing"); /* 3.13 */
    if (!asked)
        asked = (int (*)(void))dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return asked && asked();
}

void pthread_exit(void *value)
{
    while (python_finalizes())
        pause();
    void (*exit_thread)(void *) = (void (*)(void *))dlsym(RTLD_NEXT, "pthread_exit");
    exit_thread(value);
    abort();
}
