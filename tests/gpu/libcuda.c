/* Stands in for CUDA's driver, libcuda.so.1, where there is none: cuDNN then builds graphs for a GPU
   that is not there, but cannot launch them.  tests/gpu/test_deviceless.py writes names.h, a line
   STUB(cu...) for each other function of the driver that cuDNN looks up. */

#include <stddef.h>

enum { NO_DEVICE = 100, NOT_FOUND = 500 };

#define STUB(name) \
  int name(void) { return 0; }
/* Modules and functions are compiled and loaded, but nobody reads the handles. */
#define HANDLE(name) \
  int name(void **handle) { return *handle = handle, 0; }

int cuInit(unsigned flags) { return NO_DEVICE; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetProcAddress(void) { return NOT_FOUND; } /* so that names are looked up one by one */
int cuGetProcAddress_v2(void) { return NOT_FOUND; }
int cuModuleGetGlobal_v2(void **handle, size_t *size) {
  if (handle) *handle = handle;
  if (size) *size = 8;
  return 0;
}
HANDLE(cuKernelGetFunction)
HANDLE(cuLibraryGetKernel)
HANDLE(cuLibraryLoadData)
HANDLE(cuLinkCreate_v2)
HANDLE(cuModuleGetFunction)
HANDLE(cuModuleLoadData)
HANDLE(cuModuleLoadDataEx)
STUB(cuLinkAddData_v2)
STUB(cuLinkComplete)
#include "names.h"
