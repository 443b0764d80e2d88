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

/* What a process's CUDA context occupies on a card before the first cudaMalloc. */
#define CONTEXT_BYTES ((uint64_t)512 << 20)
/* The page of cuMemCreate, and the alignment of device addresses. */
#define PAGE_BYTES ((size_t)2 << 20)

#define CUDA_VERSION_SHOWN 13000
#define DRIVER_VERSION_SHOWN "580.0.phantom"
#define CARD_NAME "Phantom GPU"

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

/* cards.c: the cards, their capacity and names, and which of them this process sees. */
int card_count(void);
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

/* cudart_device.c, properties.c */
int current_device(void);
void *driver_entry(const char *name);
int device_attribute(int attribute, int card, int *value);

/* unsupported.c: says on stderr which call the phantom GPU lacks, and returns `code` to the caller. */
int unsupported(const char *call, int code);
/* Says one sentence on stderr and ends the process with exit code 2. */
_Noreturn void stop(const char *format, ...);
