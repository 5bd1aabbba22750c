/* The CUDA driver calls that the Mosaic GPU compiler makes around a compilation, answered
   as a Hopper GPU would answer them. Nothing runs: a loaded module is a pointer to nothing. */

typedef int CUresult;

enum { CUDA_VERSION = 13000 };
enum { COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97 };

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "no driver"; return 0; }
CUresult cuGetErrorName(CUresult error, const char **text) { *text = "NO_DRIVER"; return 0; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return 0; }
CUresult cuCtxGetDevice_v2(int *device, void *context) { *device = 0; return 0; }
CUresult cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
CUresult cuCtxPushCurrent_v2(void *context) { return 0; }
CUresult cuCtxPopCurrent_v2(void **context) { *context = (void *)1; return 0; }

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    default: *value = 0;
  }
  return 0;
}

CUresult cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
CUresult cuModuleUnload(void *module) { return 0; }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
