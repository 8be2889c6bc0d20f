"""Reading disassembled code: opcodes and the main loop."""

from megabit_kernels.triton.machine_code import count_instructions, main_loop

CODE = """\
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_0:
        /*0020*/               @P1 LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/            @!UPT UIADD3 URZ, URZ, URZ, URZ ;
        /*0060*/                   {op} R24, R4, R8, R24 ;
        /*0070*/               @P2 BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
"""


def test_opcodes_are_counted_without_predicates_and_modifiers() -> None:
    found = count_instructions(CODE.format(op="IMMA.16832.S8.S8").splitlines())
    once = ("LDC", "LDG", "IADD3", "UIADD3", "IMMA", "STG", "EXIT")
    assert found == {"BRA": 4, **dict.fromkeys(once, 1)}


def test_the_main_loop_multiplies_matrices() -> None:
    loop = main_loop(CODE.format(op="IMMA.16832.S8.S8").splitlines())
    assert loop == {"LDG": 1, "IADD3": 1, "BRA": 2, "UIADD3": 1, "IMMA": 1}


def test_without_products_the_main_loop_holds_no_other() -> None:
    assert main_loop(CODE.format(op="FADD").splitlines()) == {"IADD3": 1, "BRA": 1}


def test_the_branch_that_ends_a_kernel_is_no_loop() -> None:
    straight = [line for line in CODE.splitlines() if "_x_0)" not in line and "_x_1)" not in line]
    assert main_loop(straight).total() == 0
