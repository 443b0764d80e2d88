/* Before 3.14, Python ends a thread that wants the interpreter's lock while the interpreter shuts down, by pthread_exit
 * (gh-87135). PyTorch's autograd thread may be inside a C++ destructor then, which nothing may leave: the process aborts,
 * and the script's own error is lost. It happens with a real GPU too, but here the script ends as soon as backward returns.
 * So do what Python 3.14 does: let the thread stand still until the process ends. */
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
