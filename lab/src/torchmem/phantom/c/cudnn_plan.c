/* Plans whose kernels cuDNN would compile when they are finalized, which takes a second and needs
 * a driver to load them. They are not finalized: their configuration gives their workspace. */
#include "cudnn.h"

#include <pthread.h>
#include <search.h>
#include <stdlib.h>

enum { ENGINE = 2, INT64 = 3, BEHAVIOUR_NOTE = 19, RUNTIME_COMPILATION = 0 };
enum { CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, ENGINE_BEHAVIOUR = 1305 };

struct plan {
    void *descriptor, *config;
    bool compiles;
    int64_t workspace;
};

static void *tree;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int compare(const void *left, const void *right)
{
    const struct plan *a = left, *b = right;
    return (a->descriptor > b->descriptor) - (a->descriptor < b->descriptor);
}

static struct plan *plan_of(void *descriptor)
{
    struct plan **node = tfind(&(struct plan){.descriptor = descriptor}, &tree, compare);
    return node ? *node : NULL;
}

void remember_plan(void *descriptor, void *config)
{
    pthread_mutex_lock(&lock);
    struct plan *plan = plan_of(descriptor);
    if (!plan && (plan = calloc(1, sizeof *plan))) {
        plan->descriptor = descriptor;
        tsearch(plan, &tree, compare);
    }
    plan->config = config;
    pthread_mutex_unlock(&lock);
}

void forget_plan(void *descriptor)
{
    pthread_mutex_lock(&lock);
    struct plan *plan = plan_of(descriptor);
    if (plan)
        tdelete(plan, &tree, compare);
    free(plan);
    pthread_mutex_unlock(&lock);
}

static bool engine_compiles(void *config)
{
    enum { ROOM = 16 };
    int notes[ROOM];
    void *engine;
    int64_t count = 0;
    if (backend_create(ENGINE, &engine))
        return false;
    if (backend_get(config, CONFIG_ENGINE, BACKEND_DESCRIPTOR, 1, &count, &engine) ||
        backend_get(engine, ENGINE_BEHAVIOUR, BEHAVIOUR_NOTE, ROOM, &count, notes))
        count = 0;
    backend_destroy(engine);
    for (int64_t note = 0; note < count && note < ROOM; note++)
        if (notes[note] == RUNTIME_COMPILATION)
            return true;
    return false;
}

/* Returns true for a plan that must not be finalized. */
bool plan_compiles(void *descriptor)
{
    int64_t count;
    pthread_mutex_lock(&lock);
    struct plan *plan = plan_of(descriptor);
    if (plan)
        plan->compiles = engine_compiles(plan->config) &&
                         !backend_get(plan->config, CONFIG_WORKSPACE, INT64, 1, &count, &plan->workspace);
    bool compiles = plan && plan->compiles;
    pthread_mutex_unlock(&lock);
    return compiles;
}

bool plan_workspace(void *descriptor, int64_t *bytes)
{
    pthread_mutex_lock(&lock);
    struct plan *plan = plan_of(descriptor);
    bool known = plan && plan->compiles;
    if (known)
        *bytes = plan->workspace;
    pthread_mutex_unlock(&lock);
    return known;
}
