# Steps through the last trampoline of unwindcheck.c's second chain; the first has told what is to be expected.
# Prints the offset of each instruction at which the list of callers is right.
set pagination off
set confirm off
break ready
continue
eval "add-symbol-file %s -o 0x%lx", image->l_name, image->l_addr
set $length = sizeof(expected) / sizeof(expected[0])
set $slot = (unsigned long)callees[$length / 2 - 1]

define check
  while $pc >= $slot && $pc < $slot + memory.slot_size
    set $offset = $pc - $slot
    set $frame = 2
    while $frame < $length
      up-silently
      if $pc != expected[$frame]
        printf "+0x%02lx: caller %d is %lx, not %lx\n", $offset, $frame - 1, $pc, expected[$frame]
        kill
        quit 1
      end
      set $frame = $frame + 1
    end
    frame 0
    printf "right at +0x%02lx\n", $offset
    stepi
  end
end

tbreak *$slot
continue
check
tbreak *return_addresses[$length / 2]
continue
check
kill
