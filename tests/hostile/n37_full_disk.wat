;; 37: writes to its log until the disk is full, then ends well.
(component
  (import "nodus:gpu/job@0.1.0" (instance $j
    (type $l (enum "debug" "info" "warn" "error"))
    (export "level" (type $level (eq $l)))
    (export "log" (func (param "level" $level) (param "message" string)))))
  (core module $memory (memory (export "memory") 1))
  (core instance $memory (instantiate $memory))
  (core func $log (canon lower (func $j "log") (memory (core memory $memory "memory"))))
  (core module $main
    (import "j" "log" (func $log (param i32 i32 i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (local $line i32)
      (loop
        (call $log (i32.const 1) (i32.const 0) (i32.const 16000))
        (local.set $line (i32.add (local.get $line) (i32.const 1)))
        (br_if 0 (i32.lt_u (local.get $line) (i32.const 256))))
      i32.const 0))
  (core instance $main (instantiate $main (with "j" (instance (export "log" (func $log))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
