/* Stands in for libnccl: communicators of any size, in which nothing is sent. The memory that NCCL
 * takes of the GPU is an estimate (docs/preflight-reference.md): its kernels, the channels of each
 * communicator, and the buffers of its connections, allocated when a connection is first used. */
#define _GNU_SOURCE
#include "phantom.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 }; /* ncclResult_t of nccl.h */
enum { SUSPENDABLE = 0, SUSPENDED = 1, PERSISTENT = 2 };                       /* ncclCommMemStat_t */
enum { NO_COLOR = -1, FIRST_OWN_OPERATOR = 5, VERSION_WITHOUT_NCCL = 22907 };

int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);

struct unique_id {
    char bytes[128];
};

struct communicator {
    int rank, ranks, device, peers;
    bool ring, suspended;
    uint64_t taken, buffers; /* all bytes, and those of connections, which can be suspended */
};

#define MIB ((uint64_t)1 << 20)
/* Channels between eight H100s behind NVSwitch, for a ring and for a peer of send and receive
 * (NVIDIA/nccl#1685). */
enum { RING_CHANNELS = 24, PEER_CHANNELS = 32 };

/* On an H200 with NCCL 2.28.9, a communicator of one rank has 64 channels, each with three small
 * allocations (initChannel in NCCL's src/channel.cc), and two more of its own. Each takes a page of
 * 2 MiB. With peers, it has as many channels as a peer of send and receive
 * (ncclTopoComputeP2pChannels in src/graph/paths.cc). */
enum { ONLY_RANK_CHANNELS = 64, PAGES_OF_CHANNEL = 3, PAGES_OF_COMMUNICATOR = 2 };

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    uint64_t value = text ? strtoull(text, NULL, 10) : 0;
    return value ? value : otherwise;
}

/* One channel to one peer: buffers of the protocols LL, LL128 and Simple (computeBuffSizes in
 * NCCL's src/init.cc) in pages of 2 MiB, and one more page per direction. */
static uint64_t channel_bytes(void)
{
    uint64_t buffers = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + setting("NCCL_BUFFSIZE", 4 * MIB);
    return (buffers + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES + 2 * PAGE_BYTES;
}

static uint64_t limited(uint64_t channels)
{
    uint64_t most = setting("NCCL_MAX_NCHANNELS", channels);
    return channels < most ? channels : most;
}

static int take(struct communicator *comm, uint64_t bytes)
{
    if (!process_take(gpu_of(comm->device), bytes, gpu_bytes()))
        return CUDA_ERROR;
    comm->taken += bytes;
    return SUCCESS;
}

static int connect_channels(struct communicator *comm, uint64_t channels)
{
    uint64_t bytes = channel_bytes() * limited(channels);
    int result = take(comm, bytes);
    comm->buffers += result == SUCCESS ? bytes : 0;
    return result;
}

static int init_channels(struct communicator *comm)
{
    uint64_t channels = limited(comm->ranks > 1 ? PEER_CHANNELS : ONLY_RANK_CHANNELS);
    return take(comm, (channels * PAGES_OF_CHANNEL + PAGES_OF_COMMUNICATOR) * PAGE_BYTES);
}

static pthread_mutex_t connecting = PTHREAD_MUTEX_INITIALIZER;

static int collective(struct communicator *comm)
{
    pthread_mutex_lock(&connecting);
    int result = comm->ring || comm->ranks < 2 ? SUCCESS : connect_channels(comm, RING_CHANNELS);
    comm->ring |= result == SUCCESS;
    pthread_mutex_unlock(&connecting);
    return result;
}

/* Buffers to other nodes are shared, so only the peers of this node count. */
static int with_peers(struct communicator *comm, int peers)
{
    int most = (int)setting("LOCAL_WORLD_SIZE", 8), result = SUCCESS;
    most = (comm->ranks < most ? comm->ranks : most) - 1;
    pthread_mutex_lock(&connecting);
    for (; comm->peers < peers && comm->peers < most && result == SUCCESS; comm->peers += result == SUCCESS)
        result = connect_channels(comm, PEER_CHANNELS);
    pthread_mutex_unlock(&connecting);
    return result;
}

#define CALL(name, ...)    \
    int name(__VA_ARGS__); \
    int name(__VA_ARGS__)

/* The version of the NCCL that PyTorch was built with: its library is loaded too, after this one. */
CALL(ncclGetVersion, int *version)
{
    void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
    int (*real)(int *) = library ? (int (*)(int *))dlsym(library, "ncclGetVersion") : NULL;
    *version = VERSION_WITHOUT_NCCL;
    int result = real && real != ncclGetVersion ? real(version) : SUCCESS;
    if (library)
        dlclose(library);
    return result;
}

CALL(ncclGetUniqueId, struct unique_id *id)
{
    *id = (struct unique_id){"phantom"};
    return SUCCESS;
}

/* NCCL's kernels, which a process loads once for each GPU: on an H200, processes that had destroyed
 * their communicators had 926 MiB outside PyTorch, and others 742 to 768 (NCCL 2.28.9,
 * experiments/phantom_truth). */
#define KERNEL_BYTES (160 * MIB)
static bool has_kernels[MAX_GPUS];

static bool load_kernels(int gpu)
{
    pthread_mutex_lock(&connecting);
    has_kernels[gpu] = has_kernels[gpu] || process_take(gpu, KERNEL_BYTES, gpu_bytes());
    bool loaded = has_kernels[gpu];
    pthread_mutex_unlock(&connecting);
    return loaded;
}

static int create(struct communicator **comm, int ranks, int rank, int device)
{
    int gpu = gpu_of(device);
    *comm = NULL;
    if (ranks < 1 || rank < 0 || rank >= ranks || gpu < 0)
        return INVALID_ARGUMENT;
    if (!open_context(gpu) || !load_kernels(gpu))
        return CUDA_ERROR;
    struct communicator *fresh = malloc(sizeof *fresh);
    *fresh = (struct communicator){.rank = rank, .ranks = ranks, .device = device};
    if (init_channels(fresh)) {
        free(fresh);
        return CUDA_ERROR;
    }
    *comm = fresh;
    return SUCCESS;
}

CALL(ncclCommInitRankConfig, struct communicator **comm, int ranks, struct unique_id id, int rank, void *config)
{
    (void)id, (void)config;
    return create(comm, ranks, rank, current_device());
}

CALL(ncclCommInitRank, struct communicator **comm, int ranks, struct unique_id id, int rank)
{
    return ncclCommInitRankConfig(comm, ranks, id, rank, NULL);
}

CALL(ncclCommInitRankScalable, struct communicator **comm, int ranks, int rank, int id_count, struct unique_id *ids,
     void *config)
{
    (void)id_count, (void)ids, (void)config;
    return create(comm, ranks, rank, current_device());
}

CALL(ncclCommInitAll, struct communicator **comms, int count, const int *devices)
{
    int result = SUCCESS;
    for (int rank = 0; rank < count && result == SUCCESS; rank++)
        result = create(&comms[rank], count, rank, devices ? devices[rank] : rank);
    return result;
}

/* Only the ranks themselves know how many have the same color, so the new communicator has as many
 * ranks as the old one. */
CALL(ncclCommSplit, struct communicator *comm, int color, int key, struct communicator **fresh, void *config)
{
    (void)config;
    *fresh = NULL;
    bool within = key >= 0 && key < comm->ranks;
    return color == NO_COLOR ? SUCCESS : create(fresh, comm->ranks, within ? key : comm->rank, comm->device);
}

CALL(ncclCommShrink, struct communicator *comm, int *excluded, int count, struct communicator **fresh, void *config,
     int flags)
{
    (void)config, (void)flags;
    int before = 0;
    for (int index = 0; index < count; index++)
        before += excluded[index] < comm->rank;
    return create(fresh, comm->ranks - count, comm->rank - before, comm->device);
}

CALL(ncclCommGrow, struct communicator *comm, int ranks, void *id, int rank, struct communicator **fresh, void *config)
{
    (void)id, (void)config;
    return create(fresh, ranks, comm ? comm->rank : rank, comm ? comm->device : current_device());
}

CALL(ncclCommGetUniqueId, struct communicator *comm, struct unique_id *id)
{
    (void)comm;
    return ncclGetUniqueId(id);
}

CALL(ncclCommDestroy, struct communicator *comm)
{
    if (comm)
        process_give(gpu_of(comm->device), comm->taken - (comm->suspended ? comm->buffers : 0));
    free(comm);
    return SUCCESS;
}

CALL(ncclCommAbort, struct communicator *comm) { return ncclCommDestroy(comm); }

CALL(ncclCommCount, const struct communicator *comm, int *count)
{
    if (!comm) /* a rank that a split excluded */
        return INVALID_ARGUMENT;
    *count = comm->ranks;
    return SUCCESS;
}

CALL(ncclCommCuDevice, const struct communicator *comm, int *device)
{
    if (!comm)
        return INVALID_ARGUMENT;
    *device = comm->device;
    return SUCCESS;
}

CALL(ncclCommUserRank, const struct communicator *comm, int *rank)
{
    if (!comm)
        return INVALID_ARGUMENT;
    *rank = comm->rank;
    return SUCCESS;
}

CALL(ncclCommGetAsyncError, const struct communicator *comm, int *error)
{
    (void)comm;
    return *error = SUCCESS;
}

CALL(ncclCommMemStats, const struct communicator *comm, int statistic, uint64_t *value)
{
    uint64_t persistent = comm->taken - comm->buffers;
    *value = statistic == SUSPENDABLE  ? comm->buffers
             : statistic == SUSPENDED  ? comm->suspended
             : statistic == PERSISTENT ? persistent
                                       : comm->taken;
    return SUCCESS;
}

CALL(ncclCommSuspend, struct communicator *comm, int flags)
{
    (void)flags;
    if (comm->suspended)
        return INVALID_USAGE;
    process_give(gpu_of(comm->device), comm->buffers);
    comm->suspended = true;
    return SUCCESS;
}

CALL(ncclCommResume, struct communicator *comm)
{
    if (comm->suspended && !process_take(gpu_of(comm->device), comm->buffers, gpu_bytes()))
        return CUDA_ERROR;
    comm->suspended = false;
    return SUCCESS;
}

const char *ncclGetErrorString(int result);
const char *ncclGetErrorString(int result)
{
    static const char *const texts[] = {"no error", "unhandled cuda error (out of memory on the phantom GPU)",
                                        "unhandled system error", "internal error", "invalid argument"};
    bool known = result >= 0 && result < (int)(sizeof texts / sizeof *texts);
    return known ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(const struct communicator *comm);
const char *ncclGetLastError(const struct communicator *comm)
{
    (void)comm;
    return "";
}

CALL(ncclMemAlloc, void **pointer, size_t size) { return cudaMalloc(pointer, size) ? CUDA_ERROR : SUCCESS; }

CALL(ncclMemFree, void *pointer) { return cudaFree(pointer) ? CUDA_ERROR : SUCCESS; }

static size_t bytes_of(size_t count, int type)
{
    static const unsigned char widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* ncclDataType_t of nccl.h */
    return type >= 0 && type < (int)sizeof widths ? count * widths[type] : 0;
}

/* Other ranks are assumed to send what this one sends; the result of a reduction is unknown. */
CALL(ncclAllGather, const void *from, void *to, size_t count, int type, struct communicator *comm, void *stream)
{
    (void)stream;
    size_t size = bytes_of(count, type);
    for (int rank = 0; rank < comm->ranks && size <= MAX_WRITE_BYTES; rank++)
        copy_write((char *)to + (size_t)rank * size, from, size);
    return collective(comm);
}

CALL(ncclBroadcast, const void *from, void *to, size_t count, int type, int root, struct communicator *comm,
     void *stream)
{
    (void)root, (void)stream;
    copy_write(to, from, bytes_of(count, type));
    return collective(comm);
}

CALL(ncclBcast, void *buffer, size_t count, int type, int root, struct communicator *comm, void *stream)
{
    (void)buffer, (void)count, (void)type, (void)root, (void)stream;
    return collective(comm);
}

CALL(ncclAllReduce, const void *from, void *to, size_t count, int type, int operator, struct communicator *comm,
     void *stream)
{
    (void)from, (void)operator, (void)stream;
    forget_write(to, bytes_of(count, type));
    return collective(comm);
}

CALL(ncclReduce, const void *from, void *to, size_t count, int type, int operator, int root,
     struct communicator *comm, void *stream)
{
    (void)root;
    return ncclAllReduce(from, to ? to : (void *)from, count, type, operator, comm, stream);
}

CALL(ncclReduceScatter, const void *from, void *to, size_t count, int type, int operator,
     struct communicator *comm, void *stream)
{
    return ncclAllReduce(from, to, count, type, operator, comm, stream);
}

CALL(ncclSend, const void *buffer, size_t count, int type, int peer, struct communicator *comm, void *stream)
{
    (void)buffer, (void)count, (void)type, (void)peer, (void)stream;
    return with_peers(comm, 1);
}

CALL(ncclRecv, void *buffer, size_t count, int type, int peer, struct communicator *comm, void *stream)
{
    (void)peer, (void)stream;
    forget_write(buffer, bytes_of(count, type));
    return with_peers(comm, 1);
}

static int with_everyone(const struct communicator *comm) { return with_peers((struct communicator *)comm, comm->ranks); }

CALL(ncclAlltoAll, const void *from, void *to, size_t count, int type, struct communicator *comm, void *stream)
{
    (void)from, (void)stream;
    forget_write(to, bytes_of(count, type) * (size_t)comm->ranks);
    return with_everyone(comm);
}

CALL(ncclGather, const void *from, void *to, size_t count, int type, int root, struct communicator *comm, void *stream)
{
    (void)root;
    return to ? ncclAlltoAll(from, to, count, type, comm, stream) : with_everyone(comm);
}

CALL(ncclScatter, const void *from, void *to, size_t count, int type, int root, struct communicator *comm,
     void *stream)
{
    (void)from, (void)root, (void)stream;
    forget_write(to, bytes_of(count, type));
    return with_everyone(comm);
}

/* Handles are opaque. */
CALL(ncclCommRegister, const struct communicator *comm, void *buffer, size_t size, void **handle)
{
    (void)comm, (void)size;
    *handle = buffer;
    return SUCCESS;
}

CALL(ncclCommWindowRegister, const struct communicator *comm, void *buffer, size_t size, void **window, int flags)
{
    (void)flags;
    return ncclCommRegister(comm, buffer, size, window);
}

CALL(ncclRedOpCreatePreMulSum, int *operator)
{
    *operator = FIRST_OWN_OPERATOR;
    return SUCCESS;
}

/* Arguments are ignored, which C calling conventions allow. */
#define SUCCEED(name) \
    int name(void);   \
    int name(void) { return SUCCESS; }

SUCCEED(ncclCommDeregister)
SUCCEED(ncclCommFinalize)
SUCCEED(ncclCommRevoke)
SUCCEED(ncclCommWindowDeregister)
SUCCEED(ncclGroupEnd)
SUCCEED(ncclGroupStart)
SUCCEED(ncclRedOpDestroy)
