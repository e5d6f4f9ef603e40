/* cuFile on host memory, as far as kvikio calls it: the same arguments, the same results, and faults on demand.
 *
 * What is asked for on a stream happens on that stream, and the sizes and offsets are read there and then, as of cuFile's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef void *CUstream;
extern int cuLaunchHostFunc(CUstream stream, void (*call)(void *), void *argument);

typedef struct {
    int error, driver_error;
} CUfileError;
typedef struct {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *operations;
} CUfileDescr;
typedef struct {
    struct {
        unsigned major_version, minor_version;
        size_t poll_threshold, max_direct_io_kib;
        unsigned status, control;
    } nvfs;
    unsigned flags, max_cache_kib, per_buffer_cache_kib, max_pinned_kib, max_batch, batch_timeout_ms;
} CUfileDrvProps;
enum { NOT_SUPPORTED = 5038 /* CU_FILE_ASYNC_NOT_SUPPORTED */, DESCRIPTOR_REFUSED = 5031 /* CU_FILE_GETNEWFD_FAILED */ };
static const CUfileError success;

/* What tests set and ask for by name. */

static struct {
    const char *name;
    atomic_long value;
} values[] = {
    {"refuse"},        /* the error of registering a file; 0 for none */
    {"refuse_stream"}, /* the error of asking for a transfer on a stream */
    {"result"},        /* what a transfer returns instead, if it is negative: -errno, or the negative of an error of cuFile */
    {"most"},          /* bytes after which a transfer stops short; 0 for no limit */
    {"driver"},        /* the version of nvidia-fs; 0 for none */
    {"handles"},       /* files that are registered now */
    {"on_stream"},     /* transfers that were asked for on a stream */
    {"at_once"},       /* transfers that were asked for without one */
};
enum { REFUSE, REFUSE_STREAM, RESULT, MOST, DRIVER, HANDLES, ON_STREAM, AT_ONCE };
#define KINDS (int)(sizeof values / sizeof *values)

static int find(const char *name) {
    for (int i = 0; i < KINDS; i++)
        if (!strcmp(values[i].name, name))
            return i;
    abort();
}
void stub_set(const char *name, long value) { values[find(name)].value = value; }
long stub_get(const char *name) { return values[find(name)].value; }

/* Files: direct I/O asks for aligned memory, which cuFile does not, so bytes go by a descriptor of their own. As cuFile does, it
 * opens the file by its path for that, and refuses one that has lost its name. */

CUfileError cuFileHandleRegister(void **handle, CUfileDescr *description) {
    if (values[REFUSE].value)
        return (CUfileError){values[REFUSE].value, 0};
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", description->handle.fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return (CUfileError){DESCRIPTOR_REFUSED, 0};
    path[length] = 0;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return (CUfileError){DESCRIPTOR_REFUSED, 0};
    atomic_fetch_add(&values[HANDLES].value, 1);
    *handle = (void *)(intptr_t)(fd + 1);
    return success;
}
void cuFileHandleDeregister(void *handle) {
    atomic_fetch_sub(&values[HANDLES].value, 1);
    close((int)(intptr_t)handle - 1);
}

static ssize_t move(void *handle, char *memory, size_t size, off_t offset, int writes) {
    if (values[RESULT].value < 0)
        return values[RESULT].value;
    if (values[MOST].value && size > (size_t)values[MOST].value)
        size = values[MOST].value;
    int fd = (int)(intptr_t)handle - 1;
    size_t done = 0;
    while (done < size) {
        ssize_t part = writes ? pwrite(fd, memory + done, size - done, offset + done)
                              : pread(fd, memory + done, size - done, offset + done);
        if (part < 0)
            return -errno;
        if (part == 0)
            break;
        done += part;
    }
    return done;
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t offset, off_t at) {
    atomic_fetch_add(&values[AT_ONCE].value, 1);
    return move(handle, (char *)base + at, size, offset, 0);
}
ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t offset, off_t at) {
    atomic_fetch_add(&values[AT_ONCE].value, 1);
    return move(handle, (char *)base + at, size, offset, 1);
}

typedef struct {
    void *handle;
    char *base;
    size_t *size;
    off_t *offset, *at;
    ssize_t *moved;
    int writes;
} Order;

static void carry_out(void *argument) {
    Order *order = argument;
    *order->moved = move(order->handle, order->base + *order->at, *order->size, *order->offset, order->writes);
    free(order);
}
static CUfileError ask(Order what, CUstream stream) {
    atomic_fetch_add(&values[ON_STREAM].value, 1);
    if (values[REFUSE_STREAM].value)
        return (CUfileError){values[REFUSE_STREAM].value, 0};
    Order *order = malloc(sizeof *order);
    *order = what;
    return (CUfileError){cuLaunchHostFunc(stream, carry_out, order) ? NOT_SUPPORTED : 0, 0};
}
CUfileError cuFileReadAsync(void *handle, void *base, size_t *size, off_t *offset, off_t *at, ssize_t *moved, CUstream stream) {
    return ask((Order){handle, base, size, offset, at, moved, 0}, stream);
}
CUfileError cuFileWriteAsync(void *handle, void *base, size_t *size, off_t *offset, off_t *at, ssize_t *moved, CUstream stream) {
    return ask((Order){handle, base, size, offset, at, moved, 1}, stream);
}
CUfileError cuFileStreamRegister(CUstream stream, unsigned flags) { return success; }
CUfileError cuFileStreamDeregister(CUstream stream) { return success; }

/* The driver. */

CUfileError cuFileDriverOpen(void) { return success; }
CUfileError cuFileDriverClose(void) { return success; }
CUfileError cuFileDriverClose_v2(void) { return success; }
CUfileError cuFileGetVersion(int *version) {
    *version = 1150;
    return success;
}
CUfileError cuFileDriverGetProperties(CUfileDrvProps *properties) {
    memset(properties, 0, sizeof *properties);
    properties->nvfs.major_version = values[DRIVER].value;
    return success;
}

/* kvikio looks these up, and the store has no use for them. */
#define MISSING(name)                                                                                                            \
    CUfileError name(void) { return (CUfileError){NOT_SUPPORTED, 0}; }
MISSING(cuFileBufRegister)
MISSING(cuFileBufDeregister)
MISSING(cuFileDriverSetPollMode)
MISSING(cuFileDriverSetMaxCacheSize)
MISSING(cuFileDriverSetMaxPinnedMemSize)
MISSING(cuFileBatchIOSetUp)
MISSING(cuFileBatchIOSubmit)
MISSING(cuFileBatchIOGetStatus)
MISSING(cuFileBatchIOCancel)
MISSING(cuFileBatchIODestroy)
