// Python's stable ABI of 3.11, from which on one library serves every Python; and what the files of
// the module share.
#pragma once
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// Each adds a type to the module, or sets an exception and returns -1.
int add_starter(PyObject* module);
int add_guard(PyObject* module);
int add_repeated(PyObject* module);

// An object that shows whether a call is like an earlier one (guard.c).
typedef struct {
  PyObject_HEAD PyObject *check, *options, *address_of, *surroundings, *current_device;
  Py_ssize_t count;
  uint64_t given;  // a bit for each tensor that is not None
  int device, is_plain, requires_grad;
} Guard;

// The tensors that are given and their addresses, if a call is like the guard's. Returns 1, or 0 if
// it is not, or -1 with an exception. `options` may be NULL for none.
int guard_match(const Guard* guard, PyObject* const* tensors, Py_ssize_t count, PyObject* options,
                PyObject** given, PyObject** addresses);

// Of every type: its objects are freed by Python's allocator, and hold their type.
static inline void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static inline int add_type(PyObject* module, const char* name, PyType_Spec* spec) {
  PyObject* type = PyType_FromSpec(spec);
  int failed = !type || PyModule_AddObjectRef(module, name, type);
  Py_XDECREF(type);
  return failed ? -1 : 0;
}
