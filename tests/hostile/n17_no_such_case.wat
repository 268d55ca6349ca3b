;; 17: a level that the enumeration does not have.
(component
  (import "nodus:gpu/job@0.1.0" (instance $j
    (type $l (enum "debug" "info" "warn" "error"))
    (export "level" (type $level (eq $l)))
    (export "log" (func (param "level" $level) (param "message" string)))))
  (core module $memory (memory (export "memory") 1) (data (i32.const 0) "\1b[2J\nerror: forged"))
  (core instance $memory (instantiate $memory))
  (core func $log (canon lower (func $j "log") (memory (core memory $memory "memory"))))
  (core module $main
    (import "j" "log" (func $log (param i32 i32 i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $log (i32.const 9) (i32.const 0) (i32.const 4)) i32.const 0))
  (core instance $main (instantiate $main (with "j" (instance (export "log" (func $log))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
