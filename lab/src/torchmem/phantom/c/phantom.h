/* Declarations shared by all files of the phantom GPU. All sizes are bytes.
 *
 * A GPU has its number in NVML. A device is a GPU by its number in CUDA for this process, after
 * CUDA_VISIBLE_DEVICES. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_GPUS = 16 };

/* The page size of cuMemCreate, and the alignment of device addresses. */
#define PAGE_BYTES ((size_t)2 << 20)

#define DRIVER_VERSION "580.0.phantom"

/* model.c: the properties of all GPUs of the machine. `context_bytes`: memory of a process's CUDA
 * context before the first cudaMalloc. `capability`: 90 is compute capability 9.0. `cuda_version`:
 * 12040 is CUDA 12.4. */
struct model {
    char name[96];
    uint64_t bytes, context_bytes;
    int multiprocessors, capability, l2_bytes, cuda_version, machine;
};
const struct model *model(void);
int gpu_count(void);

/* processes.c: how much of which GPU each living phantom process of this machine holds. */
struct process_memory {
    pid_t pid;
    uint64_t bytes;
};
bool process_take(int gpu, uint64_t bytes, uint64_t capacity);
void process_give(int gpu, uint64_t bytes);
uint64_t process_bytes(int gpu);
int processes_on(int gpu, struct process_memory *list, int room);
uint64_t bytes_on(int gpu);
bool forked_with_context(void);

/* gpus.c: the GPUs: free memory, names, and which of them this process sees. */
uint64_t gpu_bytes(void);
uint64_t gpu_free_bytes(int gpu);
void gpu_uuid(int gpu, unsigned char uuid[16]);
void gpu_uuid_text(int gpu, char text[48]);
void gpu_pci_text(int gpu, char text[16]);
int gpu_with_uuid(const char *text);
int device_count(void);
int gpu_of(int device);
bool open_context(int gpu);

/* addresses.c: address space without memory behind it, and what each address range is used for. */
enum kind { DEVICE_MALLOC, DEVICE_MAPPED, HOST_PINNED, HOST_REGISTERED };
struct physical {
    int device;
    size_t size;
    int users;
};
struct range {
    uintptr_t start, end;
    enum kind kind;
    int device;
    struct physical *physical;
};
void *reserve_addresses(size_t size);
void release_addresses(void *start, size_t size);
bool add_range(struct range range);
bool find_range(const void *address, struct range *found);
bool remove_range(const void *start, struct range *removed);
bool on_device(const void *address);

/* address_order.c: where new address ranges start. */
void *reserve_in_order(size_t size);

/* host_writes.c: bytes that the host wrote to a GPU, until work on the GPU may have changed them. */
#define MAX_WRITE_BYTES ((size_t)1 << 20) /* the largest copy that is kept */
void keep_write(const void *device, const void *host, size_t size);
void read_back(void *host, const void *device, size_t size);
void copy_write(void *to, const void *from, size_t size);
void forget_write(const void *device, size_t size);
void forget_host_writes(void);
/* Also notes that work of unknown result ran. */
void forget_writes(void);

/* known_values.c: values other than zero that follow from zeros. */
void register_kernel(const void *function, const char *name);
void kernel_launched(const void *function, void **arguments);
void work_ran(void);
void keep_host_value(const void *device, const void *host, size_t size);
void copy_value(const void *to, const void *from, size_t size);
void forget_value(const void *device, size_t size);
void read_value(void *host, const void *device, size_t size);

/* A call that works on the GPU succeeds. Its arguments are ignored, which C calling conventions
 * allow. The second name avoids a conflict with headers. */
#define WORK(name)                           \
    int phantom_##name(void) __asm__(#name); \
    int phantom_##name(void)                 \
    {                                        \
        forget_writes();                     \
        return 0;                            \
    }

/* cudart_device.c, properties.c */
int current_device(void);
void *driver_entry(const char *name);
int device_attribute(int attribute, int gpu, int *value);

/* unsupported.c: reports a call that the phantom GPU lacks, once, on stderr and in the file `lacking`
 * of the state folder, and returns `code`. */
int unsupported(const char *call, int code);
/* Notes in the file `estimated`, once, that a workspace of this library is an estimate. */
void estimated(const char *library);
const char *state_file(const char *name, char path[4096]);
/* Prints one sentence to stderr and ends the process with exit code 2. */
_Noreturn void stop(const char *format, ...);
