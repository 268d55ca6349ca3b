;; 31: a known interface of an unknown version.
(component
  (import "nodus:gpu/job@0.2.0" (instance (export "seed" (func (result u64)))))
  (core module $main
    
    (memory (export "memory") 1)
    (func (export "run") (result i32) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
