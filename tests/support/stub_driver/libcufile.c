/* cuFile on host memory, as far as it is called: the same arguments, the same results, and faults on demand. */
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
enum { BASE_ERROR = 5000, NOT_SUPPORTED = 5038 /* CU_FILE_ASYNC_NOT_SUPPORTED */, DESCRIPTOR_REFUSED = 5031 /* CU_FILE_GETNEWFD_FAILED */ };
static const CUfileError success;

/* What tests set and ask for by name. */

static struct {
    const char *name;
    atomic_long value;
} values[] = {
    {"refuse"},        /* the error of registering a file; 0 for none */
    {"result"},        /* the negative of what a transfer fails with: an errno, or an error of cuFile */
    {"most"},          /* bytes after which a transfer stops short; 0 for no limit */
    {"driver"},        /* the version of nvidia-fs; 0 for none */
    {"handles"},       /* files that are registered now */
    {"transfers"},     /* transfers that were asked for */
};
enum { REFUSE, RESULT, MOST, DRIVER, HANDLES, TRANSFERS };
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
    if (values[RESULT].value < 0) {
        errno = -values[RESULT].value;
        return errno < BASE_ERROR ? -1 : values[RESULT].value;
    }
    if (values[MOST].value && size > (size_t)values[MOST].value)
        size = values[MOST].value;
    int fd = (int)(intptr_t)handle - 1;
    size_t done = 0;
    while (done < size) {
        ssize_t part = writes ? pwrite(fd, memory + done, size - done, offset + done)
                              : pread(fd, memory + done, size - done, offset + done);
        if (part < 0)
            return -1;
        if (part == 0)
            break;
        done += part;
    }
    return done;
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t offset, off_t at) {
    atomic_fetch_add(&values[TRANSFERS].value, 1);
    return move(handle, (char *)base + at, size, offset, 0);
}
ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t offset, off_t at) {
    atomic_fetch_add(&values[TRANSFERS].value, 1);
    return move(handle, (char *)base + at, size, offset, 1);
}

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
MISSING(cuFileReadAsync)
MISSING(cuFileWriteAsync)
MISSING(cuFileStreamRegister)
MISSING(cuFileStreamDeregister)
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
