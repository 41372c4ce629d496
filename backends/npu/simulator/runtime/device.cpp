// Initialisation, devices, versions and limits: the questions torch_npu asks while it starts.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/prctl.h>
#include <unistd.h>

#include "handles.h"
#include "report.h"
#include "scheduler.h"

using namespace sim;

namespace {
constexpr const char* kCann = "8.5.0";
bool initialised = false;
char contexts[64];  // a context is the address of its device's byte
aclError legacy(const char* op) {
  return fail(acl::kOpNotFound, std::string("op ") + op + " has no aclnn kernel here; torch_npu fell back to the "
                                "legacy path. Add it to backends/npu/simulator/ops");
}
}  // namespace

#define NOT_NEEDED(name, ...) \
  aclError name(__VA_ARGS__) { return acl::kSuccess; }

extern "C" {

aclError aclInit(const char*) {
  SIM_API(aclInit);
  if (initialised) return acl::kRepeatInitialize;
  initialised = true;
  // torch_npu's release thread, which begins later, sleeps for a microsecond at a time for ever: a third of a core.
  // Threads inherit the slack of the one that begins them; those of streams set their own.
  prctl(PR_SET_TIMERSLACK, 5'000'000);
  return acl::kSuccess;
}
NOT_NEEDED(aclFinalize, )
aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(settings().devices);
  return acl::kSuccess;
}
NOT_NEEDED(aclrtResetDevice, int32_t)
aclError aclrtGetCurrentContext(aclrtContext* out) {
  *out = &contexts[current_device()];
  return acl::kSuccess;
}
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtSetDevice(int32_t device);
aclError aclrtSetCurrentContext(aclrtContext context) {
  auto* at = static_cast<char*>(context);
  if (at < contexts || at >= contexts + settings().devices) return fail(acl::kContextNull, "not a context");
  return aclrtSetDevice(static_cast<int32_t>(at - contexts));
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = 1;
  return acl::kSuccess;
}
const char* aclrtGetSocName() { return settings().soc.c_str(); }
aclError aclsysGetVersionStr(char*, char* out) {
  strcpy(out, kCann);
  return acl::kSuccess;
}
aclError aclsysGetCANNVersion(int, acl::PackageVersion* out) {
  *out = {};
  strcpy(out->version, kCann);
  return acl::kSuccess;
}
aclError aclrtGetDeviceInfo(uint32_t, int, int64_t* value) {
  *value = 24;
  return acl::kSuccess;
}
aclError aclGetDeviceCapability(uint32_t, int, int64_t* value) {
  *value = 24;
  return acl::kSuccess;
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return acl::kSuccess;
}
aclError aclrtCtxGetSysParamOpt(int, int64_t* value) {
  *value = 0;
  return acl::kSuccess;
}
aclError aclrtGetSysParamOpt(int, int64_t* value) {
  *value = 0;
  return acl::kSuccess;
}
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return acl::kSuccess;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return acl::kSuccess;
}
aclError aclrtProcessReport(int32_t) {
  usleep(1000);
  return acl::kSuccess;
}
NOT_NEEDED(aclrtSetDeviceSatMode, int)
NOT_NEEDED(aclrtSetOpExecuteTimeOut, uint32_t)
NOT_NEEDED(aclrtSetOpWaitTimeout, uint32_t)
NOT_NEEDED(aclrtCtxSetSysParamOpt, int, int64_t)
NOT_NEEDED(aclrtSetSysParamOpt, int, int64_t)
NOT_NEEDED(aclrtDeviceEnablePeerAccess, int32_t, uint32_t)
NOT_NEEDED(aclrtGetLastError, int)
NOT_NEEDED(aclrtPeekAtLastError, int)
NOT_NEEDED(aclrtSetStreamFailureMode, aclrtStream, uint64_t)
NOT_NEEDED(aclrtSetStreamOverflowSwitch, aclrtStream, uint32_t)
NOT_NEEDED(aclrtSetStreamAttribute, aclrtStream, int, void*)
NOT_NEEDED(aclrtSubscribeReport, uint64_t, aclrtStream)
NOT_NEEDED(aclrtUnSubscribeReport, uint64_t, aclrtStream)

void aclAppLog(int level, const char* function, const char*, uint32_t line, const char* format, ...) {
  static const char* wanted = getenv("ASCENDSIM_LOG");
  if (!wanted || level < atoi(wanted)) return;
  va_list list;
  va_start(list, format);
  fprintf(stderr, "[torch_npu %d] %s:%u ", level, function, line);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
}

// Profiling hooks are called all the time and mean nothing here.
NOT_NEEDED(MsprofRegisterCallback, uint32_t, void*)
NOT_NEEDED(MsprofReportApi, uint32_t, void*)
NOT_NEEDED(MsprofReportCompactInfo, uint32_t, void*, uint32_t)
NOT_NEEDED(MsprofReportAdditionalInfo, uint32_t, void*, uint32_t)
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
uint64_t MsprofSysCycleTime() { return 0; }

// The legacy op path, taken where an aclnn op is missing. Its arguments are built in silence; the op itself is refused
// by name.
void* aclCreateTensorDesc(int, int, const int64_t*, int) { return contexts; }
void* aclCreateDataBuffer(void*, size_t) { return contexts; }
void* aclopCreateAttr() { return contexts; }
NOT_NEEDED(aclDestroyTensorDesc, void*)
NOT_NEEDED(aclDestroyDataBuffer, void*)
NOT_NEEDED(aclopDestroyAttr, void*)
NOT_NEEDED(aclSetTensorDescName, void*, const char*)
NOT_NEEDED(aclSetTensorFormat, void*, int)
NOT_NEEDED(aclSetTensorPlaceMent, void*, int)
NOT_NEEDED(aclSetTensorShape, void*, int, const int64_t*)
NOT_NEEDED(aclopSetAttrBool, void*, const char*, uint8_t)
NOT_NEEDED(aclopSetAttrInt, void*, const char*, int64_t)
NOT_NEEDED(aclopSetAttrFloat, void*, const char*, float)
NOT_NEEDED(aclopSetAttrString, void*, const char*, const char*)
NOT_NEEDED(aclopSetAttrDataType, void*, const char*, int)
size_t aclGetTensorDescNumDims(const void*) { return 0; }
NOT_NEEDED(aclGetTensorDescDimV2, const void*, size_t, int64_t*)
NOT_NEEDED(aclGetTensorDescType, const void*)
NOT_NEEDED(aclGetTensorDescFormat, const void*)
NOT_NEEDED(aclSetCompileopt, int, const char*)
aclError aclGetCompileopt(int, char* value, size_t size) {
  strncpy(value, "disable", size);  // no compilation at run time: torch_npu then takes the aclnn ops
  return acl::kSuccess;
}
size_t aclGetCompileoptSize(int) { return 8; }
aclError aclopCompileAndExecute(const char* op, ...) { return legacy(op); }
aclError aclopCompileAndExecuteV2(const char* op, ...) { return legacy(op); }

}  // extern "C"
