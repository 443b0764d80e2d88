/* cuDNN's backend API. Graphs, heuristics and plans are those of the real cuDNN, for the GPU that
 * backend_device() describes, so the workspace of a plan is what cuDNN requests on such a GPU.
 * Only the execution of a plan is replaced. */
#include "cudnn.h"

enum { ENGINE = 2, HEURISTIC = 4, PLAN = 5 };
enum { HEURISTIC_DEVICE = 204, PLAN_DEVICE = 407, ENGINE_DEVICE = 1307 };
enum { GRAPH_HANDLE = 800, PLAN_HANDLE = 400, PLAN_CONFIG = 401, PLAN_WORKSPACE = 402 };

int cudnnBackendCreateDescriptor(int type, void **descriptor);
int cudnnBackendDestroyDescriptor(void *descriptor);
int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values);
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values);
int cudnnBackendFinalize(void *descriptor);

/* The description of the GPU replaces the handle. */
int cudnnBackendCreateDescriptor(int type, void **descriptor)
{
    void *device = backend_device();
    if (!device && create_estimated(type, descriptor))
        return CUDNN_SUCCESS;
    int error = backend_create(type, descriptor);
    int name = type == HEURISTIC ? HEURISTIC_DEVICE : type == PLAN ? PLAN_DEVICE : type == ENGINE ? ENGINE_DEVICE : 0;
    return error || !name ? error : backend_set(*descriptor, name, BACKEND_DESCRIPTOR, 1, &device);
}

int cudnnBackendDestroyDescriptor(void *descriptor)
{
    if (is_estimated(descriptor)) {
        destroy_estimated(descriptor);
        return CUDNN_SUCCESS;
    }
    forget_plan(descriptor);
    return backend_destroy(descriptor);
}

int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values)
{
    if (name == PLAN_HANDLE || name == GRAPH_HANDLE)
        return CUDNN_SUCCESS;
    if (is_estimated(descriptor)) {
        set_estimated(descriptor, name, count, values);
        return CUDNN_SUCCESS;
    }
    if (name == PLAN_CONFIG)
        remember_plan(descriptor, *(void *const *)values);
    return backend_set(descriptor, name, type, count, values);
}

int cudnnBackendFinalize(void *descriptor)
{
    if (is_estimated(descriptor) || plan_compiles(descriptor))
        return CUDNN_SUCCESS;
    return backend_finalize(descriptor);
}

static int get(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values)
{
    if (is_estimated(descriptor)) {
        get_estimated(descriptor, name, room, count, values);
        return CUDNN_SUCCESS;
    }
    if (name != PLAN_WORKSPACE || !values || room < 1 || !plan_workspace(descriptor, values))
        return backend_get(descriptor, name, type, room, count, values);
    if (count)
        *count = 1;
    return CUDNN_SUCCESS;
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values)
{
    int error = get(descriptor, name, type, room, count, values);
    if (!error && name == PLAN_WORKSPACE && values && room > 0 && workspaces() == NONE)
        *(int64_t *)values = 0;
    return error;
}

WORK(cudnnBackendExecute)
