/* A driver of CUDA on host memory, as far as kvikio calls it: device memory is memory of the process.
 *
 * Waits for the default stream and blocking streams are counted: by them transfers would wait for training, and training for
 * transfers. What is not here returns CUDA_ERROR_NOT_SUPPORTED.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef int CUdevice;
typedef void *CUcontext, *CUstream;

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801 };
enum { STREAM_NON_BLOCKING = 1 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3, ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { MEMORY_TYPE_DEVICE = 2 };

/* What tests ask for by name. */

static struct {
    const char *name;
    atomic_long count;
} counts[] = {{"default_stream_waits"}, {"blocking_streams"}, {"stream_waits"}, {"copies"}, {"pinned"}};
enum { DEFAULT_STREAM_WAITS, BLOCKING_STREAMS, STREAM_WAITS, COPIES, PINNED };
#define KINDS (int)(sizeof counts / sizeof *counts)

long stub_count(const char *name) {
    for (int i = 0; i < KINDS; i++)
        if (!strcmp(counts[i].name, name))
            return counts[i].count;
    return -1;
}

void stub_reset(void) {
    for (int i = 0; i < KINDS; i++)
        counts[i].count = 0;
}

static void count(int kind) { atomic_fetch_add(&counts[kind].count, 1); }

/* Streams, on which everything is done when its call returns. */

CUresult cuStreamCreate(CUstream *made, unsigned flags) {
    if (!(flags & STREAM_NON_BLOCKING))
        count(BLOCKING_STREAMS);
    *made = malloc(1);
    return *made ? SUCCESS : OUT_OF_MEMORY;
}
CUresult cuStreamSynchronize(CUstream stream) {
    count(stream ? STREAM_WAITS : DEFAULT_STREAM_WAITS);
    return SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
    free(stream);
    return SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) { return cuStreamDestroy_v2(stream); }

/* Copies of kvikio's own path. */

static CUresult copy(CUdeviceptr target, CUdeviceptr source, size_t size) {
    count(COPIES);
    memcpy((void *)target, (void *)source, size);
    return SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    return copy(target, (CUdeviceptr)source, size);
}
CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    return copy((CUdeviceptr)target, source, size);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    return copy(target, (CUdeviceptr)source, size);
}
CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    return copy((CUdeviceptr)target, source, size);
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    return copy(target, source, size);
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t number, void *a, size_t *b,
                               size_t c, CUstream stream) {
    for (size_t i = 0; i < number; i++)
        copy(targets[i], sources[i], sizes[i]);
    return SUCCESS;
}
CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t number, void *a, size_t *b,
                            size_t c, size_t *failed, CUstream stream) {
    return cuMemcpyBatchAsync_v2(targets, sources, sizes, number, a, b, c, stream);
}

CUresult cuMemHostAlloc(void **made, size_t size, unsigned flags) {
    count(PINNED);
    *made = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return *made ? SUCCESS : OUT_OF_MEMORY;
}
CUresult cuMemFreeHost(void *memory) {
    free(memory);
    return SUCCESS;
}
CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    count(PINNED);
    return SUCCESS;
}
CUresult cuMemHostRegister(void *memory, size_t size, unsigned flags) { return cuMemHostRegister_v2(memory, size, flags); }
CUresult cuMemHostUnregister(void *memory) { return SUCCESS; }

/* One device, whose memory is all memory of the process, and its context. */

static char primary;
static __thread CUcontext contexts[64];
static __thread int depth;

CUresult cuInit(unsigned flags) { return SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return SUCCESS;
}
CUresult cuDeviceGetCount(int *number) {
    *number = 1;
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    *value = 1;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = &primary;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = depth ? contexts[depth - 1] : NULL;
    return SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (depth == sizeof contexts / sizeof *contexts)
        return INVALID_CONTEXT;
    contexts[depth++] = context;
    return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth)
        return INVALID_CONTEXT;
    *context = contexts[--depth];
    return SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxPushCurrent_v2(context); }
CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxPopCurrent_v2(context); }

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    switch (attribute) {
    case ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = &primary;
        return SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = MEMORY_TYPE_DEVICE;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = 0;
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}
CUresult cuPointerGetAttributes(unsigned number, int *attributes, void **values, CUdeviceptr address) {
    for (unsigned i = 0; i < number; i++)
        if (cuPointerGetAttribute(values[i], attributes[i], address))
            return NOT_SUPPORTED;
    return SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    if (base)
        *base = address & ~((CUdeviceptr)(2 << 20) - 1); /* as of an allocator that asks for 2 MiB at a time */
    if (size)
        *size = 1ul << 40;
    return SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    return cuMemGetAddressRange_v2(base, size, address);
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = "STUB_ERROR";
    return SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "the stub does not do that";
    return SUCCESS;
}

/* kvikio looks these up, and the store has no use for them. */
#define MISSING(name)                                                                                                            \
    CUresult name(void) { return NOT_SUPPORTED; }
MISSING(cuCtxCreate_v4)
MISSING(cuCtxCreate_v2)
MISSING(cuCtxCreate)
MISSING(cuCtxDestroy_v2)
MISSING(cuCtxDestroy)
MISSING(cuCtxSetCurrent)
MISSING(cuCtxSynchronize)
MISSING(cuDeviceGetName)
MISSING(cuEventCreate)
MISSING(cuEventDestroy_v2)
MISSING(cuEventDestroy)
MISSING(cuEventElapsedTime)
MISSING(cuEventElapsedTime_v2)
MISSING(cuEventQuery)
MISSING(cuEventRecord)
MISSING(cuEventRecordWithFlags)
MISSING(cuEventSynchronize)
MISSING(cuLaunchHostFunc)
MISSING(cuStreamGetCtx)
MISSING(cuStreamQuery)
MISSING(cuStreamWaitEvent)
