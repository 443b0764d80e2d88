/* The messages of the phantom GPU when it cannot continue: a call that it lacks, or an error. */
#define _GNU_SOURCE
#include "phantom.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Writes the path of a file in the folder through which processes share the GPUs; creates the
 * folder. */
const char *state_file(const char *name, char path[4096])
{
    char folder[4000];
    const char *set = getenv("PHANTOM_STATE_DIR");
    if (set && *set)
        snprintf(folder, sizeof folder, "%s", set);
    else
        snprintf(folder, sizeof folder, "/tmp/phantom-%u", (unsigned)getuid());
    mkdir(folder, 0700);
    snprintf(path, 4096, "%s/%s", folder, name);
    return path;
}

/* Appends the name to a file of the state folder, for the parent process; one name per line. */
static void write_name(const char *name, const char *call)
{
    char path[4096], line[256];
    int file = open(state_file(name, path), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    int length = snprintf(line, sizeof line, "%.250s\n", call);
    if (file < 0 || write(file, line, (size_t)length) < 0)
        fprintf(stderr, "phantom: cannot write %s: %s\n", path, strerror(errno));
    if (file >= 0)
        close(file);
}

static bool was_reported(const char *call)
{
    static char *names[512];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    size_t row = 0;
    pthread_mutex_lock(&lock);
    while (row < 512 && names[row] && strcmp(names[row], call))
        row++;
    bool before = row == 512 || names[row];
    if (!before)
        names[row] = strdup(call);
    pthread_mutex_unlock(&lock);
    return before;
}

int unsupported(const char *call, int code)
{
    if (was_reported(call))
        return code;
    fprintf(stderr,
            "phantom: the phantom GPU does not support %s: avoid it, or use a real GPU (docs/phantom.md)\n",
            call);
    write_name("lacking", call);
    return code;
}

void estimated(const char *library)
{
    if (!was_reported(library))
        write_name("estimated", library);
}

void stop(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fputs("phantom: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    _Exit(2);
}
