;; 16: UTF-16 at an odd address.
(component
  (import "nodus:gpu/job@0.1.0" (instance $j
    (export "metric" (func (param "name" string) (param "step" u64) (param "value" f64)))))
  (core module $memory (memory (export "memory") 400) )
  (core instance $memory (instantiate $memory))
  (core func $metric (canon lower (func $j "metric") (memory (core memory $memory "memory")) string-encoding=utf16))
  (core module $main
    (import "j" "metric" (func $metric (param i32 i32 i64 f64)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $metric (i32.const 1) (i32.const 4) (i64.const 0) (f64.const 0)) i32.const 0))
  (core instance $main (instantiate $main (with "j" (instance (export "metric" (func $metric))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
