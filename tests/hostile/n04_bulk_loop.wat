;; 4: fills 125 MiB in one instruction, again and again.
(component
  
  (core module $main
    
    (memory (export "memory") 1)
    (func (export "run") (result i32) (drop (memory.grow (i32.const 2000))) (loop (memory.fill (i32.const 0) (i32.const 0) (i32.const 0x7d00000)) (br 0)) i32.const 0))
  (core instance $main (instantiate $main ))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
