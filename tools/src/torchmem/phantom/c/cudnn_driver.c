/* Calls of libcuda.so.1 whose names cuDNN looks up before it offers an engine that compiles its kernels. Such an engine
 * never runs here, so none of them is called. Weak: another file may have the call itself. */
#include "lacking.h"

LACKING(cuCtxGetLimit, 801)
LACKING(cuCtxPopCurrent, 801)
LACKING(cuCtxPushCurrent, 801)
LACKING(cuKernelGetAttribute, 801)
LACKING(cuKernelSetAttribute, 801)
LACKING(cuLaunchKernelEx, 801)
LACKING(cuLibraryGetKernel, 801)
LACKING(cuLibraryLoadData, 801)
LACKING(cuLibraryLoadFromFile, 801)
LACKING(cuLibraryUnload, 801)
LACKING(cuLinkAddData, 801)
LACKING(cuLinkCreate, 801)
LACKING(cuLinkDestroy, 801)
LACKING(cuOccupancyMaxPotentialClusterSize, 801)
LACKING(cuStreamGetCtx, 801)
