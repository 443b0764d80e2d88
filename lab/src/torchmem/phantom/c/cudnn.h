/* Declarations shared by the cuDNN files. Calls that need no GPU are left to the real cuDNN; the
 * phantom GPU only implements those that take a handle. */
#pragma once

#include "phantom.h"

enum { CUDNN_SUCCESS = 0, CUDNN_BAD_PARAM = 2000, CUDNN_NOT_SUPPORTED = 3000 };
enum { CUDNN_FLOAT = 0, CUDNN_DOUBLE = 1, CUDNN_HALF = 2, CUDNN_INT32 = 4, CUDNN_BFLOAT16 = 9 };
enum { MAX_DIMENSIONS = 8 };

/* A function of the cuDNN that comes with PyTorch. */
void *real_cudnn(const char *name);
#define REAL(name, ...) ((int (*)(__VA_ARGS__))real_cudnn(#name))

/* The values returned by cudnnGetTensorNdDescriptor. */
struct tensor {
    int type, rank, sizes[MAX_DIMENSIONS], strides[MAX_DIMENSIONS];
};
int read_tensor(void *descriptor, struct tensor *tensor);
size_t type_bytes(int type);
size_t element_count(const struct tensor *tensor);

/* PHANTOM_CUDNN_WORKSPACE: `0` for no workspace, `estimate` for the estimate even where cuDNN
 * knows. */
enum workspaces { ASKED, ESTIMATED, NONE };
enum workspaces workspaces(void);

/* cudnn_device.c: the GPU as a descriptor of type CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, or null if
 * this cuDNN has no such type. */
enum { BACKEND_CHAR = 24, BACKEND_DESCRIPTOR = 15, BACKEND_DEVICE = 38 };
void *backend_device(void);

/* The real backend calls of cuDNN. */
int backend_create(int type, void **descriptor);
int backend_destroy(void *descriptor);
int backend_set(void *descriptor, int name, int type, int64_t count, const void *values);
int backend_get(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values);
int backend_finalize(void *descriptor);

/* cudnn_plan.c: plans that are not finalized. */
void remember_plan(void *descriptor, void *config);
void forget_plan(void *descriptor);
bool plan_compiles(void *descriptor);
bool plan_workspace(void *descriptor, int64_t *bytes);

/* cudnn_estimate.c: the phantom GPU's own graphs and plans. */
struct own;
bool is_estimated(void *descriptor);
bool create_estimated(int type, void **descriptor);
void destroy_estimated(void *descriptor);
void set_estimated(struct own *own, int name, int64_t count, void *const *values);
void get_estimated(struct own *own, int name, int64_t room, int64_t *count, void *values);
int64_t convolution_estimate(const struct tensor *x, const struct tensor *w, const struct tensor *y, int spatial);
