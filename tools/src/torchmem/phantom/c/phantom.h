/* What the files of the phantom GPU share. All sizes are bytes.
 *
 * A card is a GPU of the machine, numbered as NVML numbers it; a device is a card as CUDA numbers it for this
 * process, after CUDA_VISIBLE_DEVICES.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_CARDS = 16 };

/* The page of cuMemCreate, and the alignment of device addresses. */
#define PAGE_BYTES ((size_t)2 << 20)

#define DRIVER_VERSION_SHOWN "580.0.phantom"

/* model.c: what every card of the machine is. `context_bytes`: what a process's CUDA context occupies before the first
 * cudaMalloc. `capability`: 90 is compute capability 9.0. `cuda_version`: 12040 is CUDA 12.4. */
struct model {
    char name[96];
    uint64_t bytes, context_bytes;
    int multiprocessors, capability, l2_bytes, cuda_version;
};
const struct model *model(void);
int card_count(void);

/* processes.c: who holds how much of which card, for every living phantom process of this machine. */
struct process_memory {
    pid_t pid;
    uint64_t bytes;
};
bool process_take(int card, uint64_t bytes, uint64_t capacity);
void process_give(int card, uint64_t bytes);
uint64_t process_bytes(int card);
int processes_on(int card, struct process_memory *list, int room);
uint64_t bytes_on(int card);
bool forked_with_context(void);

/* cards.c: the cards, what is free on them, their names, and which of them this process sees. */
uint64_t card_bytes(void);
uint64_t card_free_bytes(int card);
void card_uuid(int card, unsigned char uuid[16]);
void card_uuid_text(int card, char text[48]);
void card_pci_text(int card, char text[16]);
int card_with_uuid(const char *text);
int device_count(void);
int card_of(int device);
bool open_context(int card);

/* addresses.c: address space without memory behind it, and what each address range stands for. */
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

/* echo.c: what the host wrote to a card comes back as long as no work on the card can have changed it. */
#define ECHO_BYTES ((size_t)1 << 20) /* the largest copy that is kept */
void keep_echo(const void *device, const void *host, size_t size);
void read_echo(void *host, const void *device, size_t size);
void copy_echo(void *to, const void *from, size_t size);
void forget_echo(const void *device, size_t size);
void forget_echoes(void);
/* verdict.c: the answer, where the kernel that this thread launched last asked a question. */
void learn_kernel(const void *function, const char *name);
void hear_kernel(const void *function, void **arguments);
void forget_verdict(void);
void answer_question(void *host, size_t size);

/* A call that works on the card succeeds. Its arguments are not looked at, which the calling conventions of C allow; the
 * second name hides it from headers. */
#define WORK(name)                           \
    int phantom_##name(void) __asm__(#name); \
    int phantom_##name(void)                 \
    {                                        \
        forget_echoes();                     \
        return 0;                            \
    }

/* cudart_device.c, properties.c */
int current_device(void);
void *driver_entry(const char *name);
int device_attribute(int attribute, int card, int *value);

/* unsupported.c: says on stderr which call the phantom GPU lacks, once, writes it into the file `lacking` of the folder
 * of state, and returns `code`. */
int unsupported(const char *call, int code);
const char *state_file(const char *name, char path[4096]);
/* Says one sentence on stderr and ends the process with exit code 2. */
_Noreturn void stop(const char *format, ...);
